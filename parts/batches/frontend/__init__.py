"""Batches in a frontend: files, and who runs their lines."""

from typing import Self

from penstock.frontend.api.service import Service
from penstock.frontend.part import FrontendPart
from penstock.parts.batches.frontend.routes import ROUTES
from penstock.parts.batches.frontend.runner import BatchRunner
from penstock.parts.batches.frontend.shapes import endpoints_of


class Batches(FrontendPart):
    """Runs batches where there is a database for them, in a frontend that serves."""

    routes = ROUTES

    def __init__(self, service: Service) -> None:
        self._service = service
        self.runner: BatchRunner | None = None

    @classmethod
    def of(cls, service: Service) -> Self:
        return cls(service)

    async def start(self) -> None:
        endpoints = endpoints_of(self._service.routes)
        if self._service.database is not None and endpoints:
            self.runner = BatchRunner(self._service, self._service.database, endpoints)

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.close()


PARTS = (Batches,)
