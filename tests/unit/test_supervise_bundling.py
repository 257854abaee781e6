"""An incident that the disk does not take: what is known of it only here must not be lost with the first refusal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from faults_cases import dead, evidence
from test_supervise_isolating import verdict

from midwatch.supervise import bundling
from midwatch.supervise.bundling import Bundles
from midwatch.supervise.messages import WriteVerdict

WRITTEN = WriteVerdict(cause="c", attempt=1, verdict=verdict("a0001-i01"), evidence=evidence(dead(7, -11)))


def test_it_is_tried_again_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundling, "AGAIN_S", (0.01,))
    said: list[str] = []
    (tmp_path / "incidents").write_text("in the way")

    async def story() -> None:
        task = asyncio.create_task(Bundles(tmp_path, lambda text, level: said.append(text)).write(WRITTEN, {}, ()))
        while not said:
            await asyncio.sleep(0.005)
        (tmp_path / "incidents").unlink()
        await asyncio.wait_for(task, 10.0)

    asyncio.run(story())
    assert [text.split(":")[0] for text in said] == [
        "incident a0001-i01 cannot be written down yet, it is tried again",
        "incident a0001-i01 is written down now",
    ]
    assert (tmp_path / "incidents" / "a0001-i01" / "HASHES.json").exists()


def test_the_end_of_the_run_does_not_wait_for_the_next_try(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "incidents").write_text("in the way")

    async def story(bundles: Any) -> None:
        task = asyncio.create_task(bundles.write(WRITTEN, {}, ()))
        while not said:
            await asyncio.sleep(0.005)
        bundles.end()
        await asyncio.wait_for(task, 2.0)

    async def main() -> None:
        await story(Bundles(tmp_path, lambda text, level: said.append(text)))

    asyncio.run(main())
    assert said[-1].startswith("incident a0001-i01 could not be written down: ")
