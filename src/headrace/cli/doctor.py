"""`headrace doctor`: what this machine has, and what runs on it, with reasons.

Owns the gathering and the printing. Imports torch, and works without it: a missing part is a finding, not an error.
"""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from headrace.benchmark.machine import numa_nodes, this_machine
from headrace.benchmark.tables import print_table
from headrace.checkpoint.names import list_models
from headrace.checkpoint.weight_formats import FORMATS
from headrace.version import VERSION

_TYPICAL_HEAD_DIM = 64


def examine(tp_size: int = 1, numa_bind: bool = False) -> dict[str, Any]:
    """Everything that doctor shows, ready for JSON. tp_size, numa_bind: shows what each rank of a model would get with these options.

    Raises ConfigError if there is no NUMA node to bind to.
    """
    torch = _torch()
    small = [name for name, facts in FORMATS.items() if facts.kv_cache == "int8"]
    report: dict[str, Any] = {
        "headrace": VERSION,
        "python": platform.python_version(),
        "machine": asdict(this_machine()),
        "numa_nodes": [asdict(node) for node in numa_nodes()],
        "ranks": [],
        "torch": torch,
        "kernels": [],
        "kernel_variants": [],
        # What `--kv-cache-dtype auto` and `--activations auto` choose.
        "kv_cache": f"on CPU int16 with int16 or gguf weights, int8 with {', '.join(small[:-1])} or {small[-1]} if heads have at most 128 elements, "
        "unless a short text shows that they hurt the model; else that of the weights",
        "sixteen_bits": "",
        "attention_backends": [],
        "models": [
            {"name": model.name, "state": model.state, "path": str(model.path or ""), "get": model.get}
            for model in list_models()
        ],
    }
    if torch["version"] is None:
        return report
    from headrace.config.precision import fastest_in_16_bits
    from headrace.kernels import registry
    from headrace.kernels.cpu import isa, isas

    if tp_size > 1 or numa_bind:
        report["ranks"] = _ranks(tp_size, numa_bind)
    report["kernels"] = [
        {"op": row.op, "implementation": row.implementation, "reason": row.reason} for row in registry.report()
    ]
    report["kernel_variants"] = [{"name": name, "runs": name == isa(), "reason": reason} for name, reason in isas()]
    fastest, reason = fastest_in_16_bits(isa())
    report["sixteen_bits"] = f"{fastest} on CPU: {reason}"
    report["attention_backends"] = _attention_backends()
    return report


def print_report(console: Console, report: dict[str, Any]) -> None:
    machine, torch = report["machine"], report["torch"]
    nodes = [
        f"{node['number']} (cores {node['cores'] or 'none'}, {node['memory_gib']} GiB)" for node in report["numa_nodes"]
    ]
    quota = f", container may use {machine['cpu_quota']:g}" if machine["cpu_quota"] else ""
    facts = Table(
        Column(style="bold"), Column(overflow="fold"), title="Machine", title_justify="left", show_header=False
    )
    facts.add_row("Headrace", f"{report['headrace']} on Python {report['python']}, {machine['system']}")
    facts.add_row("processor", f"{machine['cpu']}, {machine['num_cores']} cores{quota}")
    facts.add_row("instruction sets", ", ".join(machine["isa"]) or "none that the kernels use")
    facts.add_row("kernel variants", escape(_variants_line(report["kernel_variants"])))
    facts.add_row("memory", f"{machine['memory_gib']} GiB")
    facts.add_row("NUMA nodes", "; ".join(nodes) or "unknown")
    facts.add_row("torch", _torch_line(torch))
    facts.add_row("KV cache", report["kv_cache"])
    facts.add_row("16-bit models", escape(report["sixteen_bits"]) or "unknown without torch")
    print_table(console, facts)
    if report["ranks"]:
        ranks = [
            (str(row["rank"]), str(row["num_threads"]), f"{row['memory_gib']} GiB", row["numa_node"])
            for row in report["ranks"]
        ]
        _print(console, "Ranks of a model", ("rank", "threads", "weights and KV cache", "NUMA node"), ranks)
    kernels = []
    for row in report["kernels"]:
        colour = "green" if row["implementation"].startswith("native") else "yellow"
        kernels.append((row["op"], f"[{colour}]{row['implementation']}[/{colour}]", escape(row["reason"])))
    _print(console, "Kernels on CPU", ("op", "runs", "why not faster"), kernels)
    backends = [
        (row["name"], row["device"], escape("; ".join(row["reasons_against"])) or "[green]yes[/green]")
        for row in report["attention_backends"]
    ]
    _print(console, "Attention backends, best first", ("backend", "device", "works"), backends)
    models = [(row["name"], row["state"], row["path"] or row["get"]) for row in report["models"]]
    _print(console, "Models", ("model", "state", Column("file, or how to get it", overflow="fold")), models)


def _print(console: Console, title: str, columns: Sequence[str | Column], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    print_table(console, table)


def _ranks(tp_size: int, numa_bind: bool) -> list[dict[str, Any]]:
    """What each rank would get of this machine as it is now, on the CPU. Raises ConfigError if there is no NUMA node to bind to."""
    import torch

    from headrace.config.server_args import ServerArgs
    from headrace.execution.memory import available_bytes
    from headrace.processes.numa import bindings, listed
    from headrace.processes.share import share_of_machine

    args = ServerArgs(model_path="any", tp_size=tp_size, device="cpu", numa_bind=numa_bind)
    memory = available_bytes(torch.device("cpu"))
    nodes = [str(node.number) for node in numa_nodes()]
    near = f"any of {', '.join(nodes)}: ranks are bound with --numa-bind" if len(nodes) > 1 else ", ".join(nodes)
    places = bindings(args)
    rows = []
    for rank in range(tp_size):
        # The leader, which decides on the size of the KV cache, looks at the nodes of all.
        share = share_of_machine(args, places[rank:] + places[:rank])
        memory_gib = round(memory * (share.mem_fraction_static or 0.0) / 2**30, 1)
        node = f"{places[rank].node}: cores {listed(places[rank].cores)}" if places else near or "unknown"
        rows.append({"rank": rank, "num_threads": share.num_threads, "memory_gib": memory_gib, "numa_node": node})
    return rows


def _torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"version": None, "problem": f"torch cannot be imported: {error}"}
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "cuda_build": torch.version.cuda,
        "cuda_devices": devices,
    }


def _torch_line(torch: dict[str, Any]) -> str:
    if torch["version"] is None:
        return f"[red]{escape(torch['problem'])}[/red]"
    if torch["cuda_devices"]:
        return f"{torch['version']}, {', '.join(torch['cuda_devices'])}"
    missing = "no GPU found" if torch["cuda_build"] else "built without CUDA"
    return f"{torch['version']}, CPU only ({missing}), {torch['num_threads']} threads"


def _variants_line(variants: list[dict[str, Any]]) -> str:
    if not variants:
        return "none: no native kernels"
    notes = {row["name"]: "runs" if row["runs"] else row["reason"] for row in variants}
    return ", ".join(f"{name} ({note})" if note else name for name, note in notes.items())


def _attention_backends() -> list[dict[str, Any]]:
    """Each backend on each device here, for a model with heads of the usual size and the default KV type."""
    import torch

    from headrace.attention.select import BACKENDS
    from headrace.config.resolve import AttentionNeeds
    from headrace.kernels.cpu import why_not

    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        is_native = device == "cpu" and not why_not()
        needs = AttentionNeeds(device, is_native, _TYPICAL_HEAD_DIM, kv_cache_dtype="bfloat16", page_size=None)
        rows += [{"name": b.name, "device": device, "reasons_against": b.reasons_against(needs)} for b in BACKENDS]
    return rows
