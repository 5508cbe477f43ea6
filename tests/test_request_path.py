"""How much must be read to follow one request: the files that it really enters."""

from tests.request_path import files_of_a_request

MAX_FILES = 41
"""Over all processes. It falls; whoever lets it rise says why: conversations are brought into the shape that a template
can show, which is a file of its own."""


async def test_a_streaming_chat_request_enters_few_files() -> None:
    for _ in range(3):  # a timer may fire meanwhile, and enter others
        processes = await files_of_a_request()
        assert {"penstock-frontend-0", "penstock-scheduler", "penstock-worker-0"} <= set(processes)
        if len({path for paths in processes.values() for path in paths}) <= MAX_FILES:
            return
    raise AssertionError(processes)
