"""`python -m specdec_jax`: the command `specdec`, where it is not on the path."""

import sys

from specdec_jax.commands.entry import main

sys.exit(main())
