"""A plan's columns are given in the order of its fields."""

import ast
import inspect
from textwrap import dedent

from penstock.core.steps.plan_builder import PlanBuilder
from penstock.ipc.messages import StepPlan


def test_each_column_of_a_plan_gets_what_has_its_name() -> None:
    tree = ast.parse(dedent(inspect.getsource(PlanBuilder.build)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "StepPlan"]
    assert [[ast.unparse(argument) for argument in call.args] for call in calls] == [list(StepPlan.__struct_fields__)]
