"""What models write, one file for each format: tables only.

- Reasoning: think.py
- Calls as JSON: hermes.py, llama3.py, mistral.py, deepseek.py (V3.2 with tags), kimi_k2.py
- Calls with parameters between tags: qwen3_coder.py, glm.py, minimax.py; tags.py (what they share)
- Calls in notations of their own: pythonic.py, gemma.py
- Messages with headers: harmony.py (gpt-oss)
"""
