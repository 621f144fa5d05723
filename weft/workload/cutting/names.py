"""Names of values, as every process that runs a step gives them."""


def call_name(module: str, occurrence: int) -> str:
    """occurrence: of the module in the step, from 0."""
    return f"{module}@{occurrence}" if occurrence else module


def output_name(module: str, occurrence: int, leaf: int) -> str:
    """Of a tensor that a module's call has returned."""
    return f"{call_name(module, occurrence)}:{leaf}"


def is_argument(value: str) -> bool:
    return value.startswith(">")


def maker_of(value: str) -> str:
    """The module that returns it, or is called with it."""
    return value.strip(">~").rpartition(":")[0].partition(" ")[0]


def argument_name(module: str, leaf: int) -> str:
    """Of a tensor that a stage which begins at this module is called with."""
    return f">{module}:{leaf}"


def is_beside(unit: str, name: str) -> bool:
    """In one list."""
    (stack, _, number), (own, _, _) = unit.rpartition("."), name.rpartition(".")
    return stack == own and number.isdigit()
