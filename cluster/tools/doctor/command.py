"""Runs the selected checks and prints their findings."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.markup import escape
from rich.padding import Padding

from baton.cluster.options.clients import DoctorOptions, EndpointOptions, JsonOptions
from baton.cluster.tools.doctor.finding import Finding
from baton.cluster.tools.doctor.node import node
from baton.cluster.tools.doctor.running import running
from baton.cluster.tools.tables import console

MARKS = {
    "good": "[green]✓[/green]",
    "note": "[dim]·[/dim]",
    "warning": "[yellow]![/yellow]",
    "bad": "[red]✗[/red]",
}


def run(doctor: DoctorOptions, endpoint: EndpointOptions, output: JsonOptions) -> int:
    """Runs and prints the checks. Returns exit code 1 if a finding is bad: a warning stops no deployment."""
    terminal, findings = console(), list[Finding]()
    for finding in _findings(doctor, endpoint):
        findings.append(finding)
        if not output.json:
            text, remedy = escape(finding.found), escape(finding.remedy)
            terminal.print(f"{MARKS[finding.level]} [bold]{escape(finding.check)}[/bold]: {text}")
            if remedy:
                terminal.print(Padding(remedy, (0, 0, 0, 4), style="dim", expand=False))
    if output.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    return int(any(finding.level == "bad" for finding in findings))


def _findings(doctor: DoctorOptions, endpoint: EndpointOptions) -> Iterator[Finding]:
    if doctor.admin_url is not None and not endpoint.url:
        raise ValueError("--advanced.admin-url: give --url, too; without it this machine is checked")
    if endpoint.url:

        async def collect() -> list[Finding]:
            return [finding async for finding in running(doctor, endpoint)]

        yield from asyncio.run(collect())
    else:
        yield from node(doctor)
