"""What trainers and rollouts see of the extractors: ask, and get either what was asked for or the reason why not.

Imports no model and no torch: it is the control plane, and only token ids pass through it.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter

import httpx

from configs.command import PlainError
from configs.schema import Config
from store.contract import StateContract

HOPELESS = frozenset({"bad_request", "too_long", "unknown_tokens"})  # causes that no other attempt can cure
OF_THE_ASK = HOPELESS | {"non_finite", "no_room"}  # causes that say nothing against the extractor
CONNECT_S = 10.0
QUARANTINE_S = 60.0  # at most, after failures in a row: 1, 2, 4, … seconds


class ExtractionError(PlainError):
    """An extractor did not do what it was asked; `cause` is one word: one of the protocol's, or `no_extractor`,
    `unreachable`, `deadline` where none answered."""

    def __init__(self, cause: str, message: str, taken: bool = True):
        super().__init__(message)
        self.cause, self.taken = cause, taken  # taken: the extractor may have begun with it


class Pool:
    """The extractors that have registered themselves in the run's folder; they come and go. Any thread may call; every call raises
    ExtractionError.

    An ask goes where the fewest tokens are outstanding, so one that makes no progress gets no more of them, whatever its /health
    says. One that fails is left alone for a while; what it had not taken goes to another at once, what it had taken is asked for
    again by whoever asked, under another name.
    """

    def __init__(self, config: Config):
        self._registrations = config.run_dir / "extractors"
        self._wanted, self._ready_s = config.pool.min_extractors or 0, config.launch.ready_s
        self._lock, self._outstanding = threading.Lock(), Counter[str]()  # tokens, by URL
        self._failures, self._alone_until = Counter[str](), dict[str, float]()
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
        """What the running engine says about its states. Waits until there are `pool.min_extractors`."""
        end = time.monotonic() + self._ready_s
        while len(self._registered()) < self._wanted and time.monotonic() < end:
            time.sleep(0.5)
        return StateContract.model_validate(self._request("GET", "/contract"))

    def close(self) -> None:
        self._client.close()

    def _request(self, method: str, path: str, body: dict | None = None) -> dict:
        size, passed = len(body["prompt"]) + body["max_tokens"] if body else 0, set[str]()
        failure = ExtractionError("no_extractor", f"no extractor has registered in {self._registrations}")
        while url := self._choose(size, passed):
            try:
                answer = self._ask(url, method, path, body)
            except ExtractionError as error:
                self._settle(url, size, error.cause in OF_THE_ASK)
                if error.taken:
                    raise
                failure = error
                passed.add(url)
            else:
                self._settle(url, size, True)
                return answer
        raise failure

    def _choose(self, size: int, passed: set[str]) -> str | None:
        """The extractor to ask, whose load is `size` tokens more then; None: there is none besides those passed over."""
        urls, now = self._registered() - passed, time.monotonic()
        with self._lock:
            busy = [(self._alone_until.get(url, 0) > now, self._outstanding[url], random.random(), url) for url in urls]
            url = min(busy)[-1] if busy else None
            self._outstanding[url] += size
            return url

    def _settle(self, url: str, size: int, well: bool) -> None:
        with self._lock:
            self._outstanding[url] -= size
            self._failures[url] = 0 if well else self._failures[url] + 1
            self._alone_until[url] = time.monotonic() + min(QUARANTINE_S, 2.0 ** (self._failures[url] - 1)) if not well else 0

    def _ask(self, url: str, method: str, path: str, body: dict | None) -> dict:
        try:
            answer = self._client.request(method, url + path, json=body)
            content = answer.json()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ExtractionError("unreachable", f"{url}: {type(error).__name__} {error}".rstrip(), taken=False) from None
        except httpx.TimeoutException:
            raise ExtractionError("deadline", f"{url}: no answer within {self._deadline_s:g} s (pool.deadline_s)") from None
        except httpx.HTTPError as error:
            raise ExtractionError("unreachable", f"{url}: {type(error).__name__} {error}".rstrip()) from None
        except ValueError:
            raise ExtractionError("engine", f"{url}: {answer.status_code} {answer.text[:200]!r}") from None
        if answer.status_code != 200:
            error = content.get("error", {})
            cause = error.get("type", "engine")
            raise ExtractionError(cause, f"{url}: {error.get('message', answer.status_code)}", taken=cause != "draining")
        return content

    def _registered(self) -> set[str]:
        """Where extractors are now: one that was started again registers anew, at another port."""
        found = set()
        for file in self._registrations.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # it began to drain
                found.add(json.loads(file.read_text())["url"])
        return found
