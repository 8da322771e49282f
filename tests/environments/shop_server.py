"""An MCP server of two tools, over standard input and output, or over HTTP on the port of its argument."""

import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop", log_level="CRITICAL")


@server.tool()
def price(item: str) -> int:
    """The price of an item."""
    return {"lamp": 41, "chair": 19}[item]


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
