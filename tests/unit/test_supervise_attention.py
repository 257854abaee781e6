"""A coordinator that stands still, or has too much to do, and takes its own deafness for the silence of others."""

from __future__ import annotations

import asyncio

from midwatch.supervise.attention import ALLOWED_S, Attention

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * SECOND

    def __call__(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


def test_while_the_loop_turns_time_listened_is_time_passed() -> None:
    clock = Clock()
    attention = Attention(clock)
    for _ in range(50):
        clock.pass_s(0.12)
        attention.beat()
    assert attention.listened_ns() == clock.ns
    assert attention.take_missed_ns() == 0


def test_a_process_that_stood_still_has_heard_nobody_meanwhile() -> None:
    clock = Clock()
    attention = Attention(clock)
    before = attention.listened_ns()
    clock.pass_s(30.0)
    # Asked before the loop has turned: whoever comes first must not see half a minute of silence.
    assert attention.listened_ns() - before == round(ALLOWED_S * SECOND)
    assert attention.take_missed_ns() == round((30.0 - ALLOWED_S) * SECOND)
    attention.beat()
    assert attention.take_missed_ns() == 0, "told once"
    clock.pass_s(0.1)
    assert attention.listened_ns() - before == round((ALLOWED_S + 0.1) * SECOND)


def test_a_loop_that_turns_once_a_second_listens_a_quarter_of_the_time() -> None:
    clock = Clock()
    attention = Attention(clock)
    before = attention.listened_ns()
    for _ in range(8):
        for _ in range(1000):
            clock.pass_s(0.001)
            attention.listened_ns()  # each of a thousand messages asks: that is no turn of the loop
        attention.beat()
    assert attention.listened_ns() - before == round(8 * ALLOWED_S * SECOND)


def test_a_timer_waits_for_time_listened() -> None:
    async def story() -> None:
        clock, fired = Clock(), asyncio.Event()
        attention = Attention(clock)
        timer = attention.later(0.02, fired.set)
        await asyncio.sleep(0.03)
        assert not fired.is_set(), "by its own clock no time has passed"
        clock.pass_s(0.05)
        async with asyncio.timeout(5):
            await fired.wait()
        timer.cancel()
        called_off = attention.later(0.0, fired.clear)
        called_off.cancel()
        await asyncio.sleep(0.01)
        assert fired.is_set()

    asyncio.run(story())
