/**
 * A page that contains a recorded run: finds its rows and shows them in place of a hub. It sends no request.
 */
import {openRecording} from "#core/recording.js";
import {useSource} from "#ui/store.js";

/** Whether the page contains a run. */
export const isRecorded = () => document.getElementById("recording") !== null;

/** Show the run in the page. */
export async function showRecording() {
  const element = document.getElementById("recording");
  const bytes = Uint8Array.from(atob(element.textContent), (char) => char.charCodeAt(0));
  element.remove();
  const rows = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  useSource(openRecording(rows));
}
