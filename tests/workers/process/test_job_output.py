"""What the job's code prints, however it does, and what of it reaches the log."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable

import pytest

from weft.workers.process.job_output import MAX_LINE_BYTES, job_output


def sent_by(code: Callable[[], None]) -> list[str]:
    sent: list[str] = []
    with job_output(sent.append):
        code()
    return sent


def test_lines_are_sent_whole_and_what_is_none_yet_at_the_end() -> None:
    def code() -> None:
        print("one", end=" ")
        print("line", "two", sep="\n")
        print("no end", end="")

    assert sent_by(code) == ["one line\n", "two\n", "no end\n"]


def test_a_job_may_write_bytes() -> None:
    """`sys.stdout.buffer` was missing, and whoever wrote to it failed."""

    def code() -> None:
        print("text, then ", end="")
        sys.stdout.buffer.write(b"bytes\n")
        assert sys.stdout.buffer.write(memoryview(b"\xff\n")) == 2
        sys.stderr.buffer.write("ä".encode()[:1])
        sys.stderr.buffer.write("ä".encode()[1:])

    assert sent_by(code) == ["text, then bytes\n", "�\n", "ä\n"]


def test_what_libraries_ask_of_a_stream_is_answered() -> None:
    def code() -> None:
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper)
            assert (stream.encoding, stream.errors, stream.isatty(), stream.closed) == (
                "utf-8",
                "replace",
                False,
                False,
            )
            assert (stream.writable(), stream.readable(), stream.seekable()) == (True, False, False)
            assert stream.name in ("<stdout>", "<stderr>")
            stream.reconfigure(line_buffering=True)
            stream.flush()
            with pytest.raises(io.UnsupportedOperation):
                stream.fileno()
        sys.stdout.writelines(["a\n", "b\n"])
        print("a lone surrogate: \udcff", flush=True)

    assert sent_by(code) == ["a\n", "b\n", "a lone surrogate: ?\n"]


def test_the_two_streams_do_not_cut_each_others_lines() -> None:
    def code() -> None:
        print("out", end="")
        print("error", file=sys.stderr)
        print("put")

    assert sent_by(code) == ["error\n", "output\n"]


def test_a_handler_that_outlives_the_jobs_code_still_prints() -> None:
    logger = logging.Logger("a job's")
    sent: list[str] = []
    with job_output(sent.append):
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.warning("during")
    logger.warning("after")
    assert sent == ["during\n", "after\n"]


def test_a_job_may_close_its_streams() -> None:
    def code() -> None:
        print("half", end="")
        sys.stdout.close()
        sys.stderr.detach()

    assert sent_by(code) == ["half\n"]


def test_a_line_without_end_is_cut_and_never_kept_whole() -> None:
    """A job that printed dots, and never a line, had all of them in memory."""
    sent: list[str] = []
    with job_output(sent.append):
        for _ in range(5 * MAX_LINE_BYTES):
            print(".", end="")
        assert len(sent) == 4, "it was sent on the way"
        print("ä" * MAX_LINE_BYTES, end="")
    assert all(len(line.encode()) <= MAX_LINE_BYTES + 1 for line in sent)
    assert "".join(line.removesuffix("\n") for line in sent) == "." * 5 * MAX_LINE_BYTES + "ä" * MAX_LINE_BYTES


def test_a_long_text_is_sent_in_parts_whose_lines_are_whole() -> None:
    text = "".join(f"line {number}\n" for number in range(50_000))
    sent = sent_by(lambda: print(text, end=""))
    assert "".join(sent) == text
    assert len(sent) > 5
    assert all(part.endswith("\n") for part in sent)


def test_lines_of_several_threads_stay_whole() -> None:
    def code() -> None:
        start = threading.Barrier(4)

        def say(letter: str) -> None:
            start.wait()
            for _ in range(200):
                sys.stdout.buffer.write((letter * 1000 + "\n").encode())

        threads = [threading.Thread(target=say, args=(letter,)) for letter in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = "".join(sent_by(code)).splitlines()
    assert sorted(lines) == sorted(letter * 1000 for letter in "abcd" for _ in range(200))


def test_the_streams_are_given_back_also_after_an_error() -> None:
    before = sys.stdout, sys.stderr
    sent: list[str] = []

    def code() -> None:
        with job_output(sent.append):
            print("half", end="")
            raise KeyError

    with pytest.raises(KeyError):
        code()
    assert (sys.stdout, sys.stderr) == before
    assert sent == ["half\n"]
