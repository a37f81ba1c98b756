"""What `--jaxtyping-packages` checks a function's calls with: the annotations of arrays alone."""

import beartype


def arrays(function):
    """Checks shapes and dtypes by beartype; toys may stand in for a network or a model.

    Nothing is checked where a dataclass is made: JAX makes them of shapes, of places on a mesh and of None as well.
    """
    kinds = {name: kind for name, kind in function.__annotations__.items() if "jaxtyping." in str(kind)}
    if not kinds or function.__name__ == "__init__":
        return function
    function.__annotations__ = kinds
    return beartype.beartype(function)
