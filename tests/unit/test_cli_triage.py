"""``midwatch triage``: the document it prints, what people see, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midwatch.cli.main import main

CURVES = Path(__file__).resolve().parents[1] / "data" / "curves"


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["triage", *(str(word) for word in words)])


@pytest.mark.parametrize(("name", "code"), [("healthy_ddp2_s8", 0), ("ddp2_bitflip_rank1", 1)])
def test_document(name: str, code: int) -> None:
    result = call("--csv", CURVES / f"{name}.csv", "--facts", CURVES / f"{name}.facts.json", "--json")
    assert result.exit_code == code
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert set(document) == {"incidents", "verdict", "checks", "curve", "remarks"}
    assert set(document["verdict"]) == {"cause", "class", "confidence"}
    for one in document["incidents"]:
        assert {"step", "kind", "tier", "metric", "z", "text"} <= set(one)
    results = {check["check"]: check["result"] for check in document["checks"]}
    assert [check["order"] for check in document["checks"]] == list(range(1, len(results) + 1))
    assert {check["class"] for check in document["checks"]} == {"data", "code", "cluster"}
    assert results["weights that a step leaves unchanged"] == "unavailable"
    assert results["replicas hold the same parameters"] == "contradicts"


def test_text_names_step_rank_and_counts() -> None:
    result = call("--csv", CURVES / "ddp2_bitflip_rank1.csv")
    assert result.exit_code == 1
    assert "step 280" in result.output
    assert "rank 1" in result.output
    assert "cause: undecided" in result.output


def test_refusals_are_messages(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.touch()
    result = call("--csv", empty, "--json")
    assert result.exit_code == 65
    assert json.loads(result.stdout)["error"] == "TR101"
    assert call("--csv", CURVES / "healthy_s0.csv", "--facts", empty).exit_code == 65
    assert call().exit_code == 2
