"""Answers in pieces, counters of workers, a real cluster -> what `paceline bench --http` says of them, and what it leaves."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from paceline.cluster.errors import PacelineError
from paceline.cluster.types import Request, Sampling
from paceline.deploy.bench import clients, report
from paceline.deploy.bench.clients import Answer, Raw
from paceline.deploy.bench.figures import Figure
from paceline.deploy.bench.http import Counters, Shares, late_share

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

METRICS = {
    "num_steps": 2,
    "speculative_decoding": {"num_draft_tokens": 3},
    "kv_bytes": 2048,
    "kv_source": ["link"],
    "tokens_by_source": {"target": 2, "suffix": 0, "draft": 2},
    "recoveries": 0,
}


# --- clients --------------------------------------------------------------------------------------------


def events(text: str) -> list[bytes]:
    """A stream of one character an event, as chunks."""
    found = [{"choices": [{"text": char, "finish_reason": None}], "usage": None} for char in text]
    found[-1]["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    found.append({"choices": [], "usage": {"completion_tokens": len(text)}, "metrics": METRICS})
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in found]
    return [b": keep-alive\n\n", *lines, b"data: [DONE]\n\n"]


def response(text: str) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in events(text)) + b"0\r\n\r\n"


def ask_all(answer: Serve, num: int, streams: int) -> list[Raw]:
    """`num` requests to a server that answers so."""

    async def run() -> list[Raw]:
        served: list[asyncio.Task[Any]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            served.append(task)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await answer(reader, writer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            requests = [
                clients.post(Request(str(i), (i,), Sampling(i), 8), model="m", salt=f"s{i}")
                for i in range(num)
            ]
            try:
                return (await clients.run("127.0.0.1", port, requests, streams))[0]
            finally:
                await asyncio.gather(*served)

    return asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body: dict[str, Any] = json.loads(await reader.readexactly(int(length.partition(b":")[2])))
    return body


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_answers_are_read_however_they_are_cut(size: int) -> None:
    """Many requests on few connections, pieces of any size: each gets its own text, tokens and metrics."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while True:
            body = await read_request(reader)
            data = response(f"0é\r\n{body['prompt'][0]}")
            for at in range(0, len(data), size):
                writer.write(data[at : at + size])
                await writer.drain()

    answers = [clients.read(raw) for raw in ask_all(serve, 7, 3)]

    assert num_connections == 3
    assert [a.text for a in answers] == [f"0é\r\n{i}" for i in range(7)]
    assert {(a.num_tokens, a.num_events, a.finish) for a in answers} == {(5, 5, "length")}
    assert all(a.metrics == METRICS and a.ttft_s > 0 for a in answers)


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nbusy", "429.*busy"),
        (response("whole")[:-30], "closed the connection"),
        (b"", "closed the connection"),
    ],
    ids=["refused", "broken off", "nothing"],
)
def test_a_failed_request_ends_the_block_and_says_why(answer: bytes, message: str) -> None:
    """A figure over fewer requests than were asked for would be wrong."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    with pytest.raises(PacelineError, match=f"(?s){message}"):
        ask_all(serve, 4, 2)


def test_an_error_in_the_stream_is_not_taken_for_an_answer() -> None:
    """Its status was 200 already."""
    event = b'data: {"error": {"message": "the stream failed"}}\n\n'
    data = b"HTTP/1.1 200 OK\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)

    with pytest.raises(PacelineError, match="the stream failed"):
        clients.read(Raw(data, 0.0))


# --- shares ---------------------------------------------------------------------------------------------


def test_prompts_that_took_another_way_are_a_complaint() -> None:
    """Hits of a prefix cache are left out; everything else that was not sent over a link is not."""
    shares = Shares()
    for source in ("link", "link", "local:prefix_hit"):
        shares.add(Answer("text", 4, "stop", 4, {**METRICS, "kv_source": [source]}))
    assert shares.remote_prompts == 1 and shares.complaints() == []
    assert shares.accepted("draft") == 0.5 and shares.kv_bytes == 3 * 2048

    shares.add(Answer("text", 4, "stop", 4, {**METRICS, "kv_source": ["local:lease"], "recoveries": 1}))

    assert shares.remote_prompts == pytest.approx(2 / 3)
    assert len(shares.complaints()) == 2 and "local:lease 1" in shares.complaints()[0]


def test_tokens_that_no_draft_worker_foretold_are_a_complaint() -> None:
    """A scenario that runs without its draft workers measures something else."""
    shares = Shares()
    shares.add(Answer("text", 4, "stop", 4, {**METRICS, "tokens_by_source": {"target": 3, "suffix": 1}}))

    assert shares.complaints() == []
    assert shares.complaints(needs_drafts=True) == ["no token came from a draft worker"]


def test_counters_are_differences_of_what_all_workers_told() -> None:
    """Samples that were not there before count from 0."""
    late = ("paceline_draft_replies_total", (("outcome", "late"), ("worker", "decode-1")))
    used = ("paceline_draft_replies_total", (("outcome", "used"), ("worker", "decode-1")))
    alone = ("paceline_draft_replies_total", (("outcome", "unasked"), ("worker", "decode-2")))
    added = Counters({late: 12.0, used: 34.0, alone: 9.0}) - Counters({late: 10.0, used: 28.0})

    assert added.total("draft_replies_total", worker="decode-1") == 8.0
    assert late_share(added) == pytest.approx(2 / 8)
    assert (added + added).total("draft_replies_total") == 34.0
    assert added.mean("ttft_seconds") == 0.0


def test_floors_of_the_cluster_belong_to_their_streams() -> None:
    """16 and 64 streams have floors; the table shows what each row reached."""
    found = report.Report({}, False, 3, {}, compared="here against there")
    for streams in (1, 16, 64):
        row = report.HttpRow(
            "domains", streams, Figure.exactly(100), Figure.exactly(82), Figure.exactly(0.82), (3.0, 9.0), 1.5,
            {"target": 0.5, "suffix": 0.1, "draft": 0.4}, 1.0, 0, 0.02, 4096.0, 1.5, 0.03, 0.1, {"gateway": 80.0},
        )  # fmt: skip
        found.add_http(row)
    verdicts = found.verdicts()
    out = Console(file=io.StringIO(), width=130)
    found.show(out)
    text = out.file.getvalue()  # type: ignore[attr-defined]

    assert "http.vs_engine.1" not in verdicts
    assert (verdicts["http.vs_engine.16"], verdicts["http.vs_engine.64"]) == ("fail", "pass")
    assert verdicts["kv.remote_share"] == "pass"
    assert found.as_json()["figures"]["draft.late_share.16"] == 0.02
    assert json.loads(text.splitlines()[-1])["http"][2]["cpu_us"] == {"gateway": 80.0}
    assert "0.82 [0.82, 0.82]" in text and "gateway" in text


# --- a real cluster -------------------------------------------------------------------------------------


def bench(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`paceline bench --http --quick`, whose temporary files go into a folder."""
    command = [sys.executable, "-m", "paceline.deploy.cli", "bench", "--http", "--quick", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def children_of(process: subprocess.Popen[str], folder: Path) -> list[int]:
    """Processes that work for a bench: its cluster's carry its temporary folder in their environment."""
    found = []
    for other in psutil.process_iter():
        try:
            is_ours = other.pid != process.pid and other.environ().get("TMPDIR") == str(folder)
        except (psutil.Error, OSError):
            continue
        if is_ours and other.status() != psutil.STATUS_ZOMBIE:
            found.append(other.pid)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_quick_run_measures_a_cluster_and_ends_it(tmp_path: Path) -> None:
    """Equal texts, all prompts and some drafts remote, every figure there, nothing left."""
    process = bench(tmp_path, "--streams", "1", "--streams", "4", "--json", str(tmp_path / "found.json"))
    text, progress = process.communicate(timeout=380)

    assert process.returncode == 0, text + progress
    found = json.loads(text.splitlines()[-1])
    figures = found["figures"]
    assert found == json.loads((tmp_path / "found.json").read_text())
    assert found["exactness"]["mismatches"] == 0 and found["exactness"]["num_tokens"] > 500
    assert figures["kv.remote_share"] == 1 and found["complaints"] == []
    names = {f"http.vs_engine.{n}" for n in (1, 4)} | {"kv.digest_share", "kv.exposed_share", "kv.exposed_ms"}
    names |= {"kv.prompt_bytes", "draft.remote.accepted_share", "draft.late_share", "kv.handoff_share"}
    assert all(0 <= figures[f"{n}.lo"] <= figures[n] <= figures[f"{n}.hi"] for n in names)
    assert figures["kv.prompt_bytes"] == 999 * 3 * 2 * 2 * 64 * 4
    assert {"gateway", "decode", "prefill", "draft", "clients", "engine alone"} <= set(
        found["http"][0]["cpu_us"]
    )
    assert children_of(process, tmp_path) == []
    assert Counter(path.suffix for path in tmp_path.iterdir()) == {".json": 1}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupted_run_takes_its_cluster_along(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole foreground group, while requests run."""
    process = bench(tmp_path, "--streams", "2", "--pairs", "1")
    assert process.stderr is not None
    for line in process.stderr:
        if "2 streams" in line:
            break
    assert len(children_of(process, tmp_path)) > 5
    time.sleep(0.5)  # wherever that is
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=120)[0]

    assert process.returncode == 130
    assert json.loads(text.splitlines()[-1])["interrupted"]
    assert children_of(process, tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert tempfile.gettempdir() != str(tmp_path)
