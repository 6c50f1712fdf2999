"""Options are checked before anything starts: kind, range, and that a key is a key."""

import math

import pytest

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    "name, value",
    [
        ("drain_timeout_s", math.nan),
        ("drain_timeout_s", -1.0),
        ("request_timeout_s", math.inf),
        ("request_timeout_s", -0.5),
        ("request_timeout_s", 10**400),
        ("watchdog_timeout_s", 1e12),
        ("keep_alive_timeout_s", 1.5),
        ("mem_fraction_static", 0.0),
        ("mem_fraction_static", 1.0),
        ("schedule_conservativeness", 0),
        ("max_n", True),
        ("max_n", 2.0),
        ("max_n", "2"),
        ("max_n", 0),
        ("max_n", None),
        ("max_body_bytes", 2**70),
        ("max_total_tokens", 0),
        ("random_seed", -1),
        ("port", 65536),
        ("port", -1),
        ("page_size", 3),
        ("chunked_prefill_size", 0),
        ("max_step_ms", 0),
        ("max_step_ms", -250),
        ("priority_scheduling_preemption_threshold", 0),
        ("enable_priority_preemption", True),  # without policy priority
        ("disable_metrics", 1),
        ("model_path", 5),
        ("model_path", ""),
        ("host", ""),
        ("dtype", "int4"),
        ("log_requests_level", True),
        ("log_requests_level", 1),
        ("api_key", ""),
        ("api_key", "  "),
        ("admin_api_key", ""),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_the_option_s_name(name, value):
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        ServerArgs(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"request_timeout_s": 5},
        {"mem_fraction_static": 0.999, "port": 0},
        {"chunked_prefill_size": -1},
        {"max_step_ms": -1},
        {"enable_priority_preemption": True, "schedule_policy": "priority"},
        {"context_length": None, "page_size": None},
        {"log_requests": True, "log_requests_level": 1},
        {"api_key": "k"},
    ],
)
def test_values_that_can_work_are_taken(options):
    args = ServerArgs(**options)

    assert all(getattr(args, name) == value for name, value in options.items())
