"""A task set of verifiers whose agent has a tool: products, and a server that multiplies.

The server runs as a program of its own for each conversation: `python -m product`.
"""

import verifiers.v1 as vf

FACTORS = ((6, 7), (12, 12))


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def multiply(self, left: int, right: int) -> str:
        """Returns the product of two whole numbers."""
        return str(left * right)


class ProductData(vf.TaskData):
    answer: str


class ProductTask(vf.Task[ProductData]):
    @classmethod
    def toolsets(cls, config) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class ProductConfig(vf.TasksetConfig):
    pass


class ProductTaskset(vf.Taskset[ProductTask, ProductConfig]):
    def load(self) -> list[ProductTask]:
        return [ProductTask(ProductData(prompt=f"What is {a} * {b}?", answer=str(a * b))) for a, b in FACTORS]


__all__ = ["ProductTaskset"]

if __name__ == "__main__":
    Calculator.run()
