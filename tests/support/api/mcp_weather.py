"""`python -m tests.support.api.mcp_weather`: the MCP server of the agents' one tool."""

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city now."""
    return f"sunny and 21 degrees in {city}"


if __name__ == "__main__":
    server.run("stdio")
