"""`python -m tests.mcp_weather`: an MCP server over stdio with the one tool that agents call."""

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city now."""
    return f"sunny and 21 degrees in {city}"


if __name__ == "__main__":
    server.run("stdio")
