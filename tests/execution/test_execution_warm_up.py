"""The made-up steps before the first request."""

import contextlib

from msgspec.structs import replace
from runner_harness import make_driver, prompt, save_llama

from headrace.execution.worker import warm_up


def test_steps_before_the_first_request_change_no_token(tmp_path):
    save_llama(tmp_path)
    options = {"device": "cpu", "disable_native_kernels": True, "page_size": 1, "max_running_requests": 2}

    def generate(*, warmed: bool) -> list[int]:
        driver = make_driver(tmp_path, **options)
        with contextlib.closing(driver.worker):
            if warmed:
                warm_up(driver.worker, driver.info)
            return driver.generate(0, prompt(20, 1), 8)

    assert generate(warmed=True) == generate(warmed=False)


def test_a_small_pool_is_left_alone(tmp_path):
    save_llama(tmp_path)
    driver = make_driver(tmp_path, device="cpu", disable_native_kernels=True, page_size=1)

    with contextlib.closing(driver.worker):
        warm_up(None, replace(driver.info, max_total_tokens=100))
        warm_up(None, replace(driver.info, max_running_requests=1))
