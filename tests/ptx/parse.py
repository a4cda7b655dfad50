"""The text of a PTX kernel as a list of instructions. Names of registers become places in a file of registers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

STATEMENT = re.compile(r"[\s{}]*(?:(?P<label>[$\w]+):(?!:)|(?P<text>[^;]+);)")
GUARDED = re.compile(r"@(!?)(%\w+)\s+(.*)", re.DOTALL)
ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)


class Malformed(ValueError):
    """A text that is no kernel as Triton writes them."""


@dataclass(frozen=True)
class Register:
    bits: int  # 1 for a predicate
    index: int  # among the registers of that width


@dataclass(frozen=True)
class Special:
    """%tid.x, %ctaid.x and their like."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant of an instruction, as 64 bits."""

    value: int


@dataclass(frozen=True)
class Symbol:
    """A label, or the name of a parameter or of shared memory."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}"""

    parts: tuple[Operand, ...]


Operand = Register | Special | Immediate | Symbol | Address | Vector | None  # None: _, of which nothing is kept


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    text: str
    guard: Register | None = None
    negated: bool = False  # whether it runs where the guard is false

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The opcode without its modifiers, and these."""
        return tuple(self.opcode.split("."))


@dataclass(eq=False)
class Kernel:
    name: str
    parameters: dict[str, str]  # types by name, in order
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[int, int] = field(default_factory=dict)  # how many there are of each width


def parse(ptx: str) -> Kernel:
    """The one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", ptx)
    head = re.search(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{", text)
    if head is None:
        raise Malformed("there is no .entry in this text")
    kernel = Kernel(head[1], dict(_parameter(each) for each in head[2].split(",") if each.strip()))
    names = _Names(kernel)
    body = re.sub(r"^\s*\.loc\b[^\n]*$", "", _body(text, head.end()), flags=re.MULTILINE)
    for found in STATEMENT.finditer(body):
        if found["label"]:
            kernel.labels[found["label"]] = len(kernel.instructions)
        else:
            _add(kernel, names, " ".join(found["text"].split()))
    return kernel


def _parameter(text: str) -> tuple[str, str]:
    """`.param .u64 .ptr .global .align 1 name` as name and type."""
    words = text.split()
    return words[-1], words[1].lstrip(".")


def _body(text: str, start: int) -> str:
    """Return the text from the opening brace of a function to the brace that closes it."""
    depth = 1
    for found in re.finditer(r"[{}]", text[start:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return text[start : start + found.start()]
    raise Malformed("a kernel's last brace is missing")


def _add(kernel: Kernel, names: _Names, statement: str) -> None:
    if declared := DECLARATION.fullmatch(statement):
        names.declare(declared[1], declared[2])
        return
    if statement.startswith("."):  # .pragma and the like
        return
    guarded = GUARDED.fullmatch(statement)
    guard = names.register(guarded[2]) if guarded else None
    opcode, _, rest = (guarded[3] if guarded else statement).partition(" ")
    operands = tuple(names.operand(each) for each in split(rest))
    kernel.instructions.append(Instruction(opcode, operands, statement, guard, bool(guarded and guarded[1])))


def split(text: str) -> list[str]:
    """Operands: commas in brackets separate none."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text) if each.strip()]


class _Names:
    """What the names in a kernel's text mean."""

    def __init__(self, kernel: Kernel) -> None:
        self.counts, self.registers = kernel.registers, dict[str, Register]()

    def declare(self, kind: str, names: str) -> None:
        """`.reg .b32 %r<8>` declares %r0 to %r7; `.reg .b32 a, b` two."""
        bits = 1 if kind == "pred" else int(re.sub(r"\D", "", kind))
        for name in split(names):
            many = re.fullmatch(r"([%\w]+)<(\d+)>", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                index = self.counts.setdefault(bits, 0)
                self.registers[each] = Register(bits, index)
                self.counts[bits] += 1

    def register(self, name: str) -> Register:
        if name not in self.registers:
            raise Malformed(f"no register is called {name}")
        return self.registers[name]

    def operand(self, text: str) -> Operand:
        if text == "_":
            return None
        if text in self.registers:
            return self.registers[text]
        if text.startswith("{"):
            return Vector(tuple(self.operand(each) for each in split(text[1:-1])))
        if "|" in text:
            return Vector(tuple(self.operand(each) for each in text.split("|")))
        if found := ADDRESS.fullmatch(text):
            return Address(self.operand(found[1]), int(found[2] or "0", 0))
        if text.startswith("%"):
            return Special(text)
        return self._constant(text)

    def _constant(self, text: str) -> Operand:
        if found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
            return Immediate(int(found[1], 16))
        try:
            return Immediate(int(text.rstrip("U"), 0) & (2**64 - 1))
        except ValueError:
            return Symbol(text)
