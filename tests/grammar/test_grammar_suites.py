"""The JSON-Schema-Test-Suite and MaskBench, where they are present: each instance is taken rightly, or its schema is refused.

HEADRACE_JSON_SCHEMA_SUITE: a checkout of json-schema-org/JSON-Schema-Test-Suite. HEADRACE_MASKBENCH: `maskbench/data` of a checkout of
guidance-ai/jsonschemabench; HEADRACE_MASKBENCH_SAMPLE: how many of its schemas (300).
"""

import json
import os
import random
from pathlib import Path

import pytest
from grammar_harness import TOKENIZER, matcher

from bench import maskbench
from headrace.errors import RequestError
from headrace.grammar.json_schema import FORMATS


@pytest.fixture(scope="module")
def bench():
    return maskbench.Bench(TOKENIZER)


def _folder(variable):
    folder = os.environ.get(variable)
    return pytest.param(folder, marks=pytest.mark.skipif(not folder, reason=f"{variable} is not set"))


@pytest.mark.parametrize("folder", [_folder("HEADRACE_JSON_SCHEMA_SUITE")])
def test_json_schema_suite(bench, folder):
    wrong = []
    num_taken = 0
    for path in sorted(Path(folder, "tests", "draft2020-12").glob("*.json")):
        for case in json.loads(path.read_text()):
            try:
                made = matcher("json_schema", case["schema"])
            except RequestError:
                continue
            num_taken += 1
            # A known format holds, where the suite takes every format for an annotation.
            narrower = isinstance(case["schema"], dict) and case["schema"].get("format") in FORMATS
            for test in case["tests"]:
                accepted = maskbench.follow(bench, made, case["schema"], test)
                if accepted != test["valid"] and not (narrower and not accepted):
                    wrong.append(f"{path.stem}: {case['description']}: {test['description']}: {accepted}")
    assert wrong == []
    assert num_taken > 150


@pytest.mark.parametrize("folder", [_folder("HEADRACE_MASKBENCH")])
def test_maskbench(bench, folder):
    files = sorted(Path(folder).glob("*.json"))
    num = int(os.environ.get("HEADRACE_MASKBENCH_SAMPLE", "300"))
    groups = {}
    for path in random.Random(5).sample(files, min(num, len(files))):
        maskbench.run_file(bench, path, groups.setdefault(maskbench.group_of(path), maskbench.Group()), coerce=False)

    assert [name for group in groups.values() for name in group.refused_valid] == []
    assert [name for group in groups.values() for name in group.accepted_invalid] == []
    assert maskbench.totals(groups)["accepted_percent"] >= 85
