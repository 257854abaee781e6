"""Kubernetes' cordon: whose it is, and what must be said to make or to lift it. Pure: nodes come in as the API's JSON.

A cordon is one bit, ``spec.unschedulable``, and the bit does not say who has set it. Our annotations do, and Kubernetes
itself notes which client wrote which field: when a person has lifted ours and cordoned again, the annotations are
still there and the bit is theirs.
"""

from __future__ import annotations

from typing import Any, Final

from midwatch.cluster.driver import NodeState, Reply

MANAGER: Final = "midwatch"
"""How the API is told who we are, with each change."""
SINCE: Final = "midwatch/cordoned"
REASON: Final = "midwatch/reason"
"""Annotations: when, and why: the run and the incident are in the words."""
_REASON_CHARS: Final = 500

Patch = dict[str, Any]
"""A JSON merge patch."""


def isolate_patch(node: dict[str, Any], reason: str, now: str) -> Patch | Reply:
    """What to change so that the node gets no new pods, or why nothing is to be changed.

    Args:
        now: As ``2026-11-30T06:57:46Z``.
    """
    text = one_line(reason)
    if _is_cordoned(node):
        if not _is_ours(node):
            return Reply(status="unneeded", text=f"cordoned already by somebody else{_with(_owner(node))}")
        said = _annotations(node).get(REASON, "")
        # An earlier try was carried out, and its answer was lost.
        return Reply(status="done") if said == text else Reply(status="unneeded", text=f"cordoned already: {said}")
    return _patch(node, unschedulable=True, since=now, reason=text)


def release_patch(node: dict[str, Any]) -> Patch | Reply:
    """What to change so that the node gets pods again, if it was us who took it out."""
    if not _is_cordoned(node):
        return Reply(status="unneeded", text="not cordoned")
    if not _is_ours(node):
        return Reply(status="refused", text=f"cordoned by somebody else{_with(_owner(node))}")
    return _patch(node, unschedulable=None, since=None, reason=None)


def state_of(node: dict[str, Any]) -> NodeState:
    """In the words of ``kubectl get nodes``."""
    conditions = node.get("status", {}).get("conditions") or ()
    is_ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    words = ["Ready" if is_ready else "NotReady", *(["SchedulingDisabled"] if _is_cordoned(node) else [])]
    reason = _annotations(node).get(REASON, "") if _is_cordoned(node) and _is_ours(node) else ""
    return NodeState(node=node["metadata"]["name"], state=",".join(words), is_drained=_is_cordoned(node), reason=reason)


def refusal(status: int | None, text: str, what: str) -> Reply:
    """What an error of the API means for us.

    Args:
        status: The HTTP status; None when there was no answer.
        what: What was asked, as ``get node n1``.
    """
    said = one_line(text or "no answer", is_ours=False)[:200]
    match status:
        case 401:
            return Reply(status="refused", text=f"may not {what}: it does not know this identity (401: {said})")
        case 403 if "not found" not in text:
            hint = "the service account or user lacks the right; see how-to/kubernetes"
            return Reply(status="refused", text=f"may not {what}: {hint} (403: {said})")
        case 404:
            return Reply(status="refused", text=f"cannot {what}: there is none of that name")
        case 400 | 405 | 406 | 415 | 422:
            return Reply(status="refused", text=f"cannot {what}: {status}: {said}")
        case _:
            # A role that is "not found" is one that a server just started has not read yet.
            return Reply(status="silent", text=said)


def one_line(reason: str, *, is_ours: bool = True) -> str:
    """Printable, on one line, short, and recognisable as ours."""
    text = "".join(char if char.isprintable() else " " for char in reason).strip()
    return (text if text.startswith(MANAGER) or not is_ours else f"{MANAGER}: {text}")[:_REASON_CHARS]


def _patch(node: dict[str, Any], *, unschedulable: bool | None, since: str | None, reason: str | None) -> Patch:
    return {
        # Refused with 409 if anybody has changed the node since we looked: a person's cordon in between must count.
        "metadata": {
            "resourceVersion": node["metadata"]["resourceVersion"],
            "annotations": {SINCE: since, REASON: reason},
        },
        "spec": {"unschedulable": unschedulable},
    }


def _is_cordoned(node: dict[str, Any]) -> bool:
    return bool(node.get("spec", {}).get("unschedulable"))


def _is_ours(node: dict[str, Any]) -> bool:
    return SINCE in _annotations(node) and _owner(node) in ("", MANAGER)


def _owner(node: dict[str, Any]) -> str:
    """The client that has set the bit; empty when the server does not say."""
    for entry in node["metadata"].get("managedFields") or ():
        fields = entry.get("fieldsV1") or {}
        if "f:unschedulable" in (fields.get("f:spec") or {}):
            return str(entry.get("manager", ""))
    return ""


def _annotations(node: dict[str, Any]) -> dict[str, str]:
    return node["metadata"].get("annotations") or {}


def _with(owner: str) -> str:
    return f" ({owner})" if owner else ""
