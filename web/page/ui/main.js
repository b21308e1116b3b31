/** Where the page begins: takes a login out of the address, starts what runs for as long as it is open, draws it. */
import {h, render} from "#vendor/preact.js";
import {App} from "#ui/app.js";
import {startKeys} from "#ui/keys.js";
import {startLogin} from "#ui/login.js";
import {startClock} from "#ui/parts.js";
import {isRecorded, showRecording} from "#ui/recorded.js";
import {startRouter} from "#ui/router.js";
import {startTheme} from "#ui/theme.js";

startTheme();
if (isRecorded()) await showRecording();
else startLogin();
startRouter();
startKeys();
startClock();
const place = document.getElementById("app");
place.replaceChildren();
render(h(App), place);
