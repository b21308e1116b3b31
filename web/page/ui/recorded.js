/**
 * A page that holds a run: finds the rows that stand in it, and shows them in place of a hub. Nothing is asked of anybody.
 */
import {openRecording} from "#core/recording.js";
import {useSource} from "#ui/store.js";

/** Whether the page holds a run. */
export const isRecorded = () => document.getElementById("recording") !== null;

/** Show the run that the page holds. */
export async function showRecording() {
  const element = document.getElementById("recording");
  const bytes = Uint8Array.from(atob(element.textContent), (it) => it.charCodeAt(0));
  element.remove();
  const rows = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  useSource(openRecording(rows));
}
