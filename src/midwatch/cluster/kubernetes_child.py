"""The process that speaks to Kubernetes: one question from the command line, one ``Answer`` on the output.

python -m midwatch.cluster.kubernetes_child isolate NODE REASON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from midwatch.cluster.cordon import MANAGER, REASON, Patch, isolate_patch, refusal, release_patch, state_of
from midwatch.cluster.driver import NodeState, Reply
from midwatch.cluster.kubernetes import Answer
from midwatch.config import is_in_pod, kubeconfig
from midwatch.core import SYSTEM_CLOCK, load_extra

_CALL_S: Final = (3.0, 8.0)
"""To connect, and for the answer."""
_LOOKS: Final = 4
_LOOK_S: Final = 2.0
"""Whether a server that forbids what we ask is ready; it reads its roles within some seconds."""
_TRIES: Final = 5
"""When somebody else changes the node while we do; its own kubelet does, now and then."""
_PAGE: Final = 500
"""As kubectl asks."""
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Labels without the lists of container images: a tenth of the bytes."""


Decide = Callable[[dict[str, Any]], Patch | Reply]
"""The node as it is, and what is to be changed about it."""


class ApiError(Exception):
    """The API has not done it; ``reply`` says what that means."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.text)
        self.reply = reply


class ConflictError(Exception):
    """Somebody else has changed the node since we looked."""


class Api:
    """The few calls that are needed, each bounded, with the API's own JSON as result."""

    def __init__(self) -> None:
        module = load_extra("kubernetes.client", "k8s", "asking Kubernetes")
        self._rest = load_extra("kubernetes.client.exceptions", "k8s", "asking Kubernetes")
        self._http = load_extra("urllib3.exceptions", "k8s", "asking Kubernetes")
        configuration = _credentials(module)
        # A server that is down is asked again later, by the outbox, with a pause.
        configuration.retries = False
        self._http_client = module.ApiClient(configuration)
        self._http_client.user_agent = MANAGER  # in the audit log of the cluster
        self._core = module.CoreV1Api(self._http_client)

    def get(self, node: str) -> dict[str, Any]:
        return self._call(f"get node {node}", self._core.read_node, node)

    def patch(self, node: str, patch: Patch, **options: str) -> None:
        self._call(
            f"patch node {node}",
            self._core.patch_node,
            node,
            patch,
            field_manager=MANAGER,
            _content_type="application/merge-patch+json",
            **options,
        )

    def all_labels(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Page by page."""
        more = ""
        while True:
            options = {"_continue": more} if more else {}
            page = self._call(
                "list nodes", self._core.list_node, limit=_PAGE, _headers={"Accept": _METADATA_ONLY}, **options
            )
            for item in page["items"]:
                yield item["metadata"]["name"], item["metadata"].get("labels") or {}
            more = page.get("metadata", {}).get("continue", "")
            if not more:
                return

    def _call(self, what: str, method: Any, *words: Any, **options: Any) -> dict[str, Any]:
        call = partial(method, *words, _preload_content=False, _request_timeout=_CALL_S, **options)
        status, body = self._answer(what, call)
        if status == 403 and self._may_be_young():
            status, body = self._answer(what, call)
        if status == 409:
            raise ConflictError
        if status is None or not 200 <= status < 300:
            raise ApiError(refusal(status, _message(body), what))
        return json.loads(body)

    def _answer(self, what: str, call: Callable[[], Any]) -> tuple[int | None, bytes | str]:
        try:
            response = call()
            return response.status, response.read()
        except self._rest.ApiException as error:
            return error.status or None, error.body or str(error.reason or "")
        except (self._http.HTTPError, OSError) as error:
            raise ApiError(refusal(None, str(error), what)) from error

    def _may_be_young(self) -> bool:
        """A server that has just been started forbids everything until it has read the roles: wait until it is ready.

        Returns:
            Whether to ask once more. A server that does not even tell us whether it is ready is taken at its word.
        """
        status: int | None = None
        for _ in range(_LOOKS):
            status, _ = self._answer("ask whether it is ready", self._ready)
            if status == 200:
                return True
            time.sleep(_LOOK_S)
        if status != 403:
            raise ApiError(Reply(status="silent", text="it has been started just now and is not ready"))
        return False

    def _ready(self) -> Any:
        request = self._http_client.param_serialize(
            method="GET", resource_path="/readyz", auth_settings=["BearerToken"]
        )
        return self._http_client.call_api(*request, _request_timeout=_CALL_S)


def main(argv: Sequence[str]) -> Answer:
    """Raises nothing that the API or the credentials can cause."""
    verb, *words = argv
    try:
        api = Api()
        match verb:
            case "isolate":
                return Answer(reply=_isolate(api, words[0], words[1]))
            case "release":
                return Answer(reply=_change(api, words[0], release_patch))
            case "rehearse":
                return Answer(reply=_rehearse(api, words[0]))
            case "describe":
                return Answer(nodes=tuple(_describe(api, words)))
            case _:
                return Answer(labels={name: _those(words, labels) for name, labels in api.all_labels()})
    except ApiError as error:
        return Answer(reply=error.reply)
    except ConflictError:
        return Answer(reply=Reply(status="silent", text="the node keeps being changed by somebody else"))


def _isolate(api: Api, node: str, reason: str) -> Reply:
    now = datetime.fromtimestamp(SYSTEM_CLOCK.wall_ns() // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return _change(api, node, partial(isolate_patch, reason=reason, now=now))


def _rehearse(api: Api, node: str) -> Reply:
    """The right to change nodes is looked for where it is: at the server."""
    found = api.get(node)
    api.patch(node, {"metadata": {"annotations": {REASON: found["metadata"]["name"]}}}, dry_run="All")
    return Reply(status="done")


def _change(api: Api, node: str, decide: Decide) -> Reply:
    for _ in range(_TRIES - 1):
        try:
            return _try_to_change(api, node, decide)
        except ConflictError:
            continue
    return _try_to_change(api, node, decide)


def _try_to_change(api: Api, node: str, decide: Decide) -> Reply:
    patch = decide(api.get(node))
    if isinstance(patch, Reply):
        return patch
    api.patch(node, patch)
    return Reply(status="done")


def _those(keys: Sequence[str], labels: dict[str, str]) -> dict[str, str]:
    return {key: labels[key] for key in keys if key in labels}


def _describe(api: Api, names: Sequence[str]) -> Iterator[NodeState]:
    for name in names:
        try:
            yield state_of(api.get(name))
        except ApiError as error:
            if error.reply.status == "silent":
                return


def _credentials(client: Any) -> Any:
    """A kubeconfig that was named, else the pod's service account, else the kubeconfig in the home folder."""
    config = load_extra("kubernetes.config", "k8s", "asking Kubernetes")
    configuration = client.Configuration()
    try:
        if is_in_pod() and not kubeconfig():
            config.load_incluster_config(configuration)
        else:
            config.load_kube_config(client_configuration=configuration)
    except config.ConfigException as error:
        text = f"there are no credentials for it here: {error}"
        raise ApiError(Reply(status="refused", text=text[:300])) from error
    return configuration


def _message(body: bytes | str) -> str:
    """The API explains itself in a Status object; what stands in front of it (a proxy) in any words."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(main(sys.argv[1:])).decode())
