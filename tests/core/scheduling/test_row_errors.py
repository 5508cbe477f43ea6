"""A row without a next token ends its own sequence, whatever step and state that happens in."""

import pytest
from msgspec.structs import replace

from penstock.core.scheduling.scheduler import UnexpectedResultError
from penstock.ipc.messages import RowError
from tests.core.driver import Driver, make_limits, make_request


class FailingDriver(Driver):
    """Its worker finds no token for one sampling row of one step."""

    def __init__(self, step_id: int, sample_idx: int, depth: int) -> None:
        super().__init__(make_limits(), pipeline_depth=depth)
        self.step_id, self.error = step_id, RowError(sample_idx, "nothing goes on here")

    def execute(self) -> None:
        super().execute()
        if self.results[-1].step_id == self.step_id:
            self.results[-1] = replace(self.results[-1], row_errors=(self.error,))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("failing_step", [0, 1, 3, 5])
def test_only_that_sequence_ends(depth: int, failing_step: int) -> None:
    driver = FailingDriver(failing_step, 1, depth)
    for i, name in enumerate(("a", "b", "c")):
        assert driver.add(make_request(name, range(100 * i, 100 * i + 10), 6)) is None
    driver.run()
    failed = driver.finished["b", 0]
    assert (failed.finish_reason, failed.error_code, failed.error) == ("error", "grammar", "nothing goes on here")
    assert len(driver.outputs["b", 0]) == failing_step  # the token of that step is not told
    for name in ("a", "c"):
        assert driver.finished[name, 0].finish_reason == "length"
        assert len(driver.outputs[name, 0]) == 6


def test_an_error_of_no_row_is_refused() -> None:
    driver = FailingDriver(0, 1, depth=0)
    assert driver.add(make_request("a", range(10), 6)) is None
    with pytest.raises(UnexpectedResultError, match="got an error of row 1"):
        driver.run()
