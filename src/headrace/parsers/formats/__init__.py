"""What models write, one file for each format: tables only.

- Reasoning: think.py
- Calls as JSON: hermes.py
"""
