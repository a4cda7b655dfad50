"""What a user asks for by `reply`, and which exchange that means for so many ranks."""

from __future__ import annotations

from typing import Literal, get_args

from onebit.collectives.direct import Direct
from onebit.collectives.exchange import Exchange, Reply
from onebit.collectives.two_phases import TwoPhases
from onebit.kernels.data.checks import is_one_of, is_whole

AskedReply = Literal["auto", "direct", 1]
EXCHANGES: dict[Reply, type[Exchange]] = {each.reply_option: each for each in (TwoPhases, Direct)}


def check_reply(reply: object) -> None:
    if not is_one_of(reply, ("auto", "direct")) and not (is_whole(reply) and reply in EXCHANGES):
        raise ValueError(
            f'reply={reply!r:.80}: it must be one of {get_args(AskedReply)}: every rank\'s message to all ("direct"), '
            f"the mean compressed to 1 bit once more (1), as in the papers, or whichever suits the number of ranks "
            f'("auto")'
        )


def exchange_for(reply: AskedReply, ranks: int) -> type[Exchange]:
    """ "auto": direct where it sends no more bytes than two phases do, which is with two ranks."""
    return EXCHANGES[("direct" if ranks == 2 else 1) if reply == "auto" else reply]
