/** Entry module of the page. The module takes a login from the address, starts the services of the page, and draws the
 * page. */
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
