#!/usr/bin/env python3
"""Show how two scripts of the family differ, section by section.

    scripts/diff.py ppo_shared ppo_atari               # the second file, seen from the first
    scripts/diff.py ppo_atari                          # a file, seen from its parent
    scripts/diff.py --sizes                            # the size of every diff in the family
    scripts/diff.py ppo_atari ppo --carry Run          # copy a section from the first to the second
    scripts/diff.py ppo_atari --carry Run --to-family  # ... to all files that must have the same

A section begins with a heading `# === Name`; what stands above the first one is the Header.
"""

import argparse
import difflib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent

# The family tree: each file and its parent. A new file gets one line here, one in EQUAL below and
# one in tests/family.toml.
FAMILY = {
    "ppo_shared": "ppo",
    "ppo_atari": "ppo_shared",
    "ppo_continuous": "ppo",
    "ppo_distributed": "ppo_atari",
    "ppo_lstm": "ppo_atari",
    "ppo_multidiscrete": "ppo_shared",
    "envpool_ppo": "ppo_atari",
    "appo_async": "ppo_atari",
}
# the sections that a file has byte for byte from its parent
EQUAL = {
    "ppo_shared": ("Arguments", "Environment", "Advantages", "Training", "Run"),
    "ppo_atari": ("Advantages", "Training", "Run"),
    "ppo_continuous": ("Advantages", "Run"),
    "ppo_distributed": ("Environment", "Agent", "Advantages"),
    "ppo_lstm": ("Advantages",),
    "ppo_multidiscrete": ("Advantages",),
    "envpool_ppo": ("Advantages",),
    "appo_async": (),
}
# the sections whose size counts, if not all: the others are another algorithm, and are not compared
COMPARED = {"appo_async": ("Environment", "Agent", "Run")}
HEADING = re.compile(r"^# === (.+)\n", re.MULTILINE)
CONTEXT = 3  # unchanged lines shown around a change


class Size(NamedTuple):
    """Lines removed from the parent, lines added, and the number of places where that happens."""

    removed: int
    added: int
    places: int

    def __str__(self):
        return f"-{self.removed} +{self.added}"


def sections(text: str) -> dict[str, str]:
    """Cut a script at its headings, which belong to what follows; the parts make up the text."""
    header, *parts = HEADING.split(text)
    names = parts[::2]
    if len({"Header", *names}) != 1 + len(names):
        raise ValueError(f"a heading stands twice, or is called Header: {', '.join(names)}")
    bodies = zip(names, parts[1::2], strict=True)
    return {"Header": header} | {name: f"# === {name}\n{body}" for name, body in bodies}


def changes(old: list[str], new: list[str]) -> difflib.SequenceMatcher:
    """Compare two lists of lines. autojunk would take a frequent line such as "" for no match."""
    return difflib.SequenceMatcher(None, old, new, autojunk=False)


def section_size(old: str, new: str) -> Size:
    opcodes = changes(old.splitlines(), new.splitlines()).get_opcodes()
    places = [place for place in opcodes if place[0] != "equal"]
    removed, added = (sum(p[i + 1] - p[i] for p in places) for i in (1, 3))
    return Size(removed, added, len(places))


def diff_size(parent: str, child: str, compared: tuple[str, ...] | None = None) -> Size:
    """Measure the diff between the texts of two scripts: the sum over their sections, or some."""
    old, new = sections(parent), sections(child)
    names = compared or list(dict.fromkeys((*old, *new)))
    sizes = [section_size(old.get(name, ""), new.get(name, "")) for name in names]
    return Size(*map(sum, zip(*sizes, strict=True)))


def relatives(name: str, section: str) -> set[str]:
    """Name the files in which this section must be the same text as in the given one."""
    found: set[str] = {name}
    while True:
        pairs = [{child, FAMILY[child]} for child in FAMILY if section in EQUAL[child]]
        more = found.union(*(pair for pair in pairs if pair & found))
        if more == found:
            return found - {name}
        found = more


def show(old_name: str, new_name: str, colour: bool) -> None:
    """Print the unified diff of two scripts, with the line numbers of the whole files."""

    def paint(code: int, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if colour else text

    old, new = sections(read(old_name)), sections(read(new_name))
    size = diff_size(read(old_name), read(new_name))
    print(paint(1, f"{old_name}.py -> {new_name}.py  {size}, {size.places} places"))
    old_line = new_line = 1
    for name in dict.fromkeys((*old, *new)):
        a, b = (part.get(name, "").splitlines() for part in (old, new))
        if a == b:
            print(paint(1, f"=== {name}") + f"  equal, {len(a)} lines")
        else:
            size = section_size(old.get(name, ""), new.get(name, ""))
            print(paint(1, f"=== {name}") + f"  {size}, {size.places} places")
        for group in changes(a, b).get_grouped_opcodes(CONTEXT):
            (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
            ranges = f"-{old_line + i1},{i2 - i1} +{new_line + j1},{j2 - j1}"
            print(paint(36, f"@@ {ranges} @@"))
            for kind, i1, i2, j1, j2 in group:
                if kind == "equal":
                    print(*(f" {line}" for line in a[i1:i2]), sep="\n")
                    continue
                for line in a[i1:i2]:
                    print(paint(31, f"-{line}"))
                for line in b[j1:j2]:
                    print(paint(32, f"+{line}"))
        old_line, new_line = old_line + len(a), new_line + len(b)


def show_sizes() -> None:
    """Print a table of all pairs of parent and child."""
    print(f"{'parent -> child':<34} {'size':<11} places  lines")
    for child, parent in FAMILY.items():
        old, new = read(parent), read(child)
        size = diff_size(old, new, COMPARED.get(child))
        lines = f"{len(old.splitlines())} -> {len(new.splitlines())}"
        lines += f"  ({', '.join(COMPARED[child])} alone)" if child in COMPARED else ""
        print(f"{f'{parent} -> {child}':<34} {size!s:<11} {size.places:>6}  {lines}")


def carry(section: str, source: str, targets: list[str]) -> None:
    """Copy a section, byte for byte, from one file to others."""
    block = sections(read(source)).get(section)
    for target in targets:
        parts = sections(read(target))
        if block is None or section not in parts:
            fail(f"there is no section {section} in {source if block is None else target}.py")
        if parts[section] == block:
            print(f"{target}.py has the same {section} already")
        else:
            (ROOT / f"{target}.py").write_bytes(
                "".join((parts | {section: block}).values()).encode()
            )
            print(f"{target}.py: {section} is now that of {source}.py")


def read(name: str) -> str:
    return (ROOT / f"{name}.py").read_bytes().decode()


def fail(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("names", nargs="*", metavar="FILE", help="ppo_atari or ppo_atari.py")
    parser.add_argument("--sizes", action="store_true", help="a table of all diffs")
    parser.add_argument("--carry", metavar="SECTION", help="copy a section from the first file")
    parser.add_argument("--to-family", action="store_true", help="copy it to all relatives")
    args = parser.parse_args()

    if args.sizes:
        return show_sizes()
    names = [Path(name).stem for name in args.names]
    if missing := [name for name in names if not (ROOT / f"{name}.py").exists()]:
        fail(f"there is no {missing[0]}.py in {ROOT}")
    if args.to_family:
        if not args.carry or len(names) != 1:
            fail("--to-family needs --carry SECTION, and one file to copy from")
        targets = sorted(relatives(names[0], args.carry))
        if not targets:
            fail(f"no file must have the same {args.carry} as {names[0]}.py")
        return carry(args.carry, names[0], targets)
    if len(names) == 1 and not args.carry:
        if names[0] not in FAMILY:
            fail(f"{names[0]}.py has no parent: name two files")
        names.insert(0, FAMILY[names[0]])
    if len(names) != 2:
        fail("name two files, or one that has a parent, or use --sizes")
    if args.carry:
        return carry(args.carry, names[0], names[1:])
    return show(*names, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `scripts/diff.py ... | head` is no error
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
