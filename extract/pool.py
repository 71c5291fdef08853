"""What trainers and rollouts see of the extractors: ask, and get either what was asked for or the reason why not.

Imports no model and no torch: it is the control plane, and only token ids pass through it.
"""

from __future__ import annotations

import json

import httpx

from configs.schema import Config
from store.contract import StateContract

HOPELESS = frozenset({"bad_request", "too_long", "unknown_tokens"})  # causes that no other attempt can cure
CONNECT_S = 10.0


class ExtractionError(Exception):
    """An extractor did not do what it was asked; `cause` is one word: one of the protocol's, or `no_extractor`,
    `unreachable`, `deadline` where none answered."""

    def __init__(self, cause: str, message: str):
        super().__init__(message)
        self.cause = cause


class Pool:
    """The extractor that has registered itself in the run's folder. Any thread may call; every call raises ExtractionError."""

    def __init__(self, config: Config):
        self._registrations = config.run_dir / "extractors"
        self._deadline_s = config.pool.deadline_s
        # A proxy of the environment has no business between two machines of one run.
        self._client = httpx.Client(
            timeout=httpx.Timeout(self._deadline_s, connect=min(CONNECT_S, self._deadline_s)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def make(self, name: str, token_ids: list[int]) -> None:
        """Have the states of `token_ids` made and published as the sample `name` ("run/rank/sequence/attempt").

        Returns when the sample can be read from the store.
        """
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": {"sample": name}}
        self._request("POST", "/v1/completions", body)

    def complete(self, token_ids: list[int], max_tokens: int, sample: str | None = None, **sampling) -> tuple[list[int], str]:
        """The verifier's continuation, ids of its end included, and why it ended: "stop" or "length".

        sampling: temperature (0 unless given), top_p, top_k, seed. With `sample`, a vLLM engine publishes the states of prompt
        and continuation under this name, but for the last token, which it never reads.
        """
        body = {"prompt": token_ids, "max_tokens": max_tokens, "temperature": 0.0, **sampling, "return_token_ids": True}
        if sample:
            body["kv_transfer_params"] = {"sample": sample, "include_output_tokens": True}
        choice = self._request("POST", "/v1/completions", body)["choices"][0]
        return choice["token_ids"], choice["finish_reason"]

    def contract(self) -> StateContract:
        """What the running engine says about its states."""
        return StateContract.model_validate(self._request("GET", "/contract"))

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, path: str, body: dict | None = None) -> dict:
        url = self._find()
        try:
            answer = self._client.request(method, url + path, json=body)
            content = answer.json()
        except httpx.TimeoutException:
            raise ExtractionError("deadline", f"{url}: no answer within {self._deadline_s:g} s (pool.deadline_s)") from None
        except httpx.HTTPError as error:
            raise ExtractionError("unreachable", f"{url}: {type(error).__name__} {error}".rstrip()) from None
        except ValueError:
            raise ExtractionError("engine", f"{url}: {answer.status_code} {answer.text[:200]!r}") from None
        if answer.status_code != 200:
            error = content.get("error", {})
            raise ExtractionError(error.get("type", "engine"), f"{url}: {error.get('message', answer.status_code)}")
        return content

    def _find(self) -> str:
        """Where the extractor is now: one that was started again registers anew, at another port."""
        for file in sorted(self._registrations.glob("*.json")):
            try:
                return json.loads(file.read_text())["url"]
            except FileNotFoundError:  # it began to drain
                continue
        raise ExtractionError("no_extractor", f"no extractor has registered in {self._registrations}")
