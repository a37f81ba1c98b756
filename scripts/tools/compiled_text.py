"""Reads the text of a program compiled for a TPU or GPU.

It gives estimated cycles, bytes of our Pallas kernels, copies in loops, widened weights,
collectives, and the kernels of loops.
"""

import collections
import math
import re


def computations(text: str) -> dict[str, list[str]]:
    """Returns the instructions of each computation of a program, the entry's under "ENTRY"."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"^(?:ENTRY )?%?[\w.\-]+ \(.*?^}", text, re.MULTILINE | re.DOTALL):
        first, *lines = block.splitlines()
        found["ENTRY" if first.startswith("ENTRY") else first.split()[0].lstrip("%")] = lines
    return found


def estimated_cycles(lines: list[str]) -> int:
    """Returns the compiler's estimate of one run of a computation, without the loops in it.

    It is the sum of the cycles of all instructions, which are `lines`.
    """
    cycles = map(int, re.findall(r'"estimated_cycles":"(\d+)"', "\n".join(lines)))
    return sum(number for number in cycles if number < 2**40)  # a huge number: no estimate


def kernel_bytes(lines: list[str]) -> int:
    """Returns the bytes that Pallas kernels read and write in one run, without inner loops.

    The kernels state them; the compiler estimates no cycles for them.
    """
    return sum(map(int, re.findall(r'"bytes_accessed":"(\d+)"', "\n".join(lines))))


def bodies(lines: list[str]) -> list[str]:
    """Returns the names of the bodies of a computation's loops, in their order."""
    return [name for line in lines for name in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]


def counted_bodies(parts: dict[str, list[str]], name: str) -> list[tuple[str, int | None]]:
    """Returns the bodies of the loops of computation `name`, and how often each runs.

    That is known of a loop that counts from 0 to a constant, else it is None.
    """
    found = []
    loop = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
    for condition, body in loop.findall("\n".join(parts[name])):
        text = "\n".join(parts[condition])
        compared = re.search(r"ROOT .* compare\(\S+, %?([\w.\-]+)\), direction=LT", text)
        last = compared and re.search(
            rf"%?{re.escape(compared[1])} = s32\S* constant\((\d+)\)", text
        )
        found.append((body, int(last[1]) if last else None))
    return found


def loop_copies(text: str, least: int = 2**20) -> list[str]:
    """Returns the arrays of at least `least` bytes that bodies of loops copy."""
    parts = computations(text)
    names = {name for lines in parts.values() for name in bodies(lines)}
    widths = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "pred": 1}
    found = []
    for line in (line for name in names for line in parts.get(name, ())):
        copied = re.search(r"= (\w+)\[([\d,]+)\]\S* copy(?:-start)?\(", line)
        if copied and widths.get(copied[1], 4) * _numbers(copied[2]) >= least:
            found.append(f"{copied[1]}[{copied[2]}]")
    return sorted(found)


def widened(text: str, least: int = 2**16) -> list[str]:
    """Returns the arrays of at least `least` numbers that a program writes by widening int8 ones.

    A product that reads a weight in int8 widens it inside a fusion. A weight that is widened before
    has two or four times the bytes, which are written and read again.
    """
    parts, found = computations(text), []
    inside = {
        name
        for lines in parts.values()
        for line in lines
        for name in re.findall(r" fusion\(.*calls=%?([\w.\-]+)", line)
    }
    for lines in (lines for name, lines in parts.items() if name not in inside):
        made = (re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = s8\[([\d,]+)\]", line) for line in lines)
        int8_sizes = {one[1]: _numbers(one[2]) for one in made if one}
        for line in filter(_launches, lines):
            output, operands = re.findall(r" = (\(.*?\)|\S+) [\w\-]+\((.*?)\)", line)[0]
            sizes = {int8_sizes.get(name) for name in re.findall(r"[\w.\-]+", operands)}
            for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", output):
                if dtype != "s8" and least <= _numbers(shape) and _numbers(shape) in sizes:
                    found.append(f"{dtype}[{shape}]")
    return sorted(found)


def _numbers(shape: str) -> int:
    return math.prod(map(int, shape.split(",")))


def collectives(text: str) -> dict[str, int]:
    """Returns how many collectives of each kind a program has."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return dict(collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", text)))


def loops(text: str) -> list[dict[str, int | None]]:
    """Counts, for each loop of a program compiled for a GPU, the kernels that its body launches.

    Returns:
      For each loop, inner ones before outer ones: `kernels`, outside of inner loops; `in_layers`,
      how many of those belong to a decoder's layers; `inner`, the loops in the body; and
      `trip_count`, None if unknown, so that the host reads the condition each time.
    """
    parts, found = computations(text), []
    for line in (line for lines in parts.values() for line in lines if " while(" in line):
        body = parts[re.findall(r"body=%?([\w.\-]+)", line)[0]]
        kernels = [part for part in body if _launches(part)]
        trips = re.search(r'"known_trip_count":{"n":"(\d+)"', line)
        found.append(
            {
                "kernels": len(kernels),
                "in_layers": sum("/layers_" in part for part in kernels),
                "inner": sum(" while(" in part for part in body),
                "trip_count": int(trips[1]) if trips else None,
            }
        )
    return sorted(found, key=lambda loop: loop["inner"] or 0)


def _launches(line: str) -> bool:
    kind = re.search(r" = (?:\(.*?\)|\S+) ([\w\-]+)\(", line)
    free = (
        "parameter|get-tuple-element|tuple|constant|bitcast|while|conditional|partition-id|.*-done"
    )
    return kind is not None and not re.fullmatch(free, kind[1])
