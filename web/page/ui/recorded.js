/**
 * A page that contains a recorded run. This module finds the rows of the run and shows them instead of a hub. The page
 * sends no requests.
 */
import {openRecording} from "#core/recording.js";
import {useSource} from "#ui/store.js";

/** Return whether the page contains a recorded run. */
export const isRecorded = () => document.getElementById("recording") !== null;

/** Show the recorded run that the page contains. */
export async function showRecording() {
  const element = document.getElementById("recording");
  const bytes = Uint8Array.from(atob(element.textContent), (char) => char.charCodeAt(0));
  element.remove();
  const rows = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  useSource(openRecording(rows));
}
