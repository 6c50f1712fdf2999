"""A front end on a fake engine, checked and closed after each test."""

import pytest_asyncio
from frontend_fakes import Frontend, turns


@pytest_asyncio.fixture
async def make_frontend():
    """Makes front ends with given options. When the test ends nothing may be left of any call."""
    made = []

    def make(**options):
        made.append(Frontend(**options))
        return made[-1]

    yield make
    for frontend in made:
        frontend.engine.pump()
        await turns()
        assert frontend.is_clean
        await frontend.manager.close()
