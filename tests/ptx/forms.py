"""The opcodes that the emulator executes, each with all its modifiers: what is not written here has no meaning there.

No sum, difference or product of floats without a rounding: `ptxas` may fuse two of them.
"""

from __future__ import annotations

import re

from tests.ptx.opcodes import Unknown

_BITS, _INTEGER, _ANY = "(16|32|64)", "[su](16|32|64)", "[busf](8|16|32|64)"
_ROUNDED = r"rn\.((ftz\.)?f32|f64)"
_FORMS = (
    rf"(add|sub)\.({_INTEGER}|[su]16x2|{_ROUNDED})",
    rf"mul\.(lo\.{_INTEGER}|hi\.[su](32|64)|wide\.[su](16|32)|{_ROUNDED})",
    rf"mad\.(lo\.{_INTEGER}|wide\.[su](16|32))",
    rf"(div|sqrt)\.{_ROUNDED}",
    rf"(abs|neg)\.(s{_BITS}|(ftz\.)?f32)",
    rf"(min|max)\.({_INTEGER}|(ftz\.)?(NaN\.)?f32)",
    rf"(and|or|xor|not)\.(b{_BITS}|pred)",
    rf"shl\.b{_BITS}|shr\.[bsu]{_BITS}",
    rf"mov\.([busf]{_BITS}|pred)|selp\.[busf]{_BITS}",
    rf"setp\.(eq|ne|lt|le|gt|ge)\.[bsu]{_BITS}|setp\.(eq|ne|lt|le|gt|ge)u?\.((ftz\.)?f32|f64)",
    r"bfe\.[su](32|64)|prmt\.b32|popc\.b(32|64)",
    r"cvt\.([su](8|16|32|64)\.[su](8|16|32|64)|rn\.f32\.[su](16|32|64)|f32\.b?f16|rn\.b?f16(x2)?\.f32)",
    r"cvt\.(f64\.f32|rn\.f32\.f64|rn\.f64\.[su](32|64))",
    r"shfl\.sync\.(bfly|idx)\.b32|redux\.sync\.(add|min|max)\.[su]32",
    rf"ld\.param\.{_ANY}|ld\.global(\.cg)?(\.v[24])?\.{_ANY}|st\.global(\.v[24])?\.{_ANY}",
    rf"(ld|st)\.shared(::cta)?(\.v[24])?\.{_ANY}|(ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?|stmatrix\.sync\.aligned\.m8n8\.x4)\.shared\.b16",
    r"atom\.global\.gpu\.(relaxed|acq_rel)\.(add\.u|exch\.b)32",
    r"bra(\.uni)?|ret|bar\.sync|bar\.warp\.sync",
)
_KNOWN = re.compile("|".join(_FORMS))


def check(opcode: str) -> None:
    if not _KNOWN.fullmatch(opcode):
        raise Unknown(f"no instruction is called {opcode}")
