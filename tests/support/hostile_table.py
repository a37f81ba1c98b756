"""Gathers the hostile files of all modules, which add theirs to one table."""

import hostile_cases
import hostile_formats
import hostile_pytorch

MODULES = hostile_cases, hostile_formats, hostile_pytorch
CASES = hostile_cases.CASES
