"""Headrace beside llama.cpp's server and OpenVINO GenAI on one machine, in turns: `python -m bench.compare`. Run bench/compare/setup first."""
