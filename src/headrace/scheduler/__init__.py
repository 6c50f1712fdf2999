"""Decides what each step computes, and applies the results. No torch: it handles tokens, pages and counts.

Read first: scheduler.py (the only loop), request.py (`Req`, and samples of one prompt), planner.py, commit.py.

- State: state.py (with `ScheduleBatch`, the plan of a step), kv_manager.py (pages, leases, rows)
- Who runs next: waiting.py (lanes of keys and priorities, policies), fairness.py (turns of keys), admission.py (how much memory a request will
  need), retract.py (who gives way), grammar_queue.py (those whose grammar is being compiled), tier_queue.py (those whose prefix is being loaded),
  rooms.py (those whose prompt is computed by another server, or for one)
- Pinned prefixes: pins.py
- How much a step computes: step_cost.py (how long steps take, how many tokens of prompts fit)
- Images: encodings.py (which of them are encoded, and who waits for them)
- Operations: control.py, lora.py (loads beside the steps), weights.py (pause, updates)
- Tests: faults.py (injected ones)
"""
