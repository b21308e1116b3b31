/**
 * Files that the hub stores (the mod `files`): upload in chunks, download with a checked checksum, and attachments with
 * a preview. Only bitmaps are shown as images, and texts are shown as plain text, because a browser must not run what
 * others have uploaded.
 */
import {useEffect, useState} from "#vendor/hooks.js";
import {sha256} from "#core/hash.js";
import {writeSize} from "#core/text.js";
import {Button, html} from "#ui/parts.js";
import {actions} from "#ui/store.js";

const CHUNK_BYTES = 128 * 1024;
const MAX_PREVIEW_BYTES = 5_000_000;
const MAX_TEXT_BYTES = 20_000;
const BITMAP = /^image\/(png|jpeg|gif|webp|avif)$/;
const TEXT = /^text\/|^application\/(json|yaml)$/;

/** Upload the bytes of a file, and return the description that a message attaches. Throws the hub's refusal. */
export async function uploadFile(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const upload_id = crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random().toString(16).slice(2)}`;
  let offset = 0;
  do {
    const data = encode(bytes.subarray(offset, offset + CHUNK_BYTES));
    ({size: offset} = await actions.call("files.upload", {upload_id, offset, data}));
  } while (offset < bytes.length);
  const media_type = /^[a-z0-9.+-]{1,60}\/[a-z0-9.+-]{1,60}$/.test(file.type) ? file.type : "";
  const {file: id, version, name, media_type: kind, size} = await actions.call("files.create", {upload_id, sha256: sha256(bytes), name: (file.name || "file").slice(-200), media_type});
  return {file: id, version, name, media_type: kind, size};
}

/** Download a stored file as {name, media_type, bytes}. Throws an error if the file has more than `most` bytes. */
async function downloadFile({file, version}, most = Infinity) {
  const args = Number.isInteger(version) ? {file, version} : {file};
  let part = await actions.call("files.download", {...args, offset: 0});
  if (part.size > most) throw new Error(`${part.name} is too large for a preview. Save it to see it.`); // the message may state a wrong size
  const bytes = new Uint8Array(part.size);
  for (let offset = 0; offset < part.size; ) {
    if (offset) part = await actions.call("files.download", {file, version: part.version, offset});
    const data = decode(part.data);
    if (!data.length) throw new Error("The node has only a part of this file.");
    bytes.set(data, offset);
    offset += data.length;
  }
  if (sha256(bytes) !== part.sha256) throw new Error("The bytes of this file are damaged. Tell the operator of the node.");
  return {...part, bytes};
}

const encode = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
const decode = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

/** Let the browser save bytes as a file. The browser never opens the bytes as a page. */
export function saveBytes(bytes, name) {
  const place = URL.createObjectURL(new Blob([bytes], {type: "application/octet-stream"}));
  Object.assign(document.createElement("a"), {href: place, download: name.replace(/[/\\\p{Cc}]/gu, "_").slice(-120)}).click();
  setTimeout(() => URL.revokeObjectURL(place), 10_000);
}

/** A stored file in a message: its name, a preview of an image or a text, and a button that saves it. */
export function StoredFile({given}) {
  const [problem, setProblem] = useState("");
  const name = typeof given.name === "string" && given.name ? given.name : "file";
  const type = typeof given.media_type === "string" ? given.media_type : "";
  const label = [type, writeSize(given.size)].filter(Boolean).join(", ");
  const report = (error) => setProblem(String(error?.message ?? error));
  const save = () => downloadFile(given).then((file) => saveBytes(file.bytes, file.name)).catch(report);
  const isShown = BITMAP.test(type) && given.size <= MAX_PREVIEW_BYTES;
  return html`<figure class="attachment">${isShown && html`<${Picture} given=${given} name=${name} report=${report} />`}
    <figcaption><bdi>${name}</bdi>${label && html` <span class="faint">${label}</span>`} <${Button} kind="small" run=${save}>Save<//></figcaption>
    ${TEXT.test(type) && html`<${Text} given=${given} report=${report} />`}
    ${problem && html`<p class="refused" role="alert">${problem}</p>`}</figure>`;
}

function Picture({given, name, report}) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    let place = "";
    let isGone = false;
    downloadFile(given, MAX_PREVIEW_BYTES).then(({bytes, media_type}) => {
      if (isGone || !BITMAP.test(media_type)) return; // trust the type that the node reports, not the type in the message
      place = URL.createObjectURL(new Blob([bytes], {type: media_type}));
      setUrl(place);
    }).catch(report);
    return () => {
      isGone = true;
      if (place) URL.revokeObjectURL(place);
    };
  }, [given.file, given.version]);
  return url && html`<img src=${url} alt=${name} class="picture" />`;
}

function Text({given, report}) {
  const [text, setText] = useState(null);
  const load = async (event) => {
    if (!event.target.open || text !== null) return;
    try {
      const args = Number.isInteger(given.version) ? {version: given.version} : {};
      const part = await actions.call("files.read", {file: given.file, ...args, length: MAX_TEXT_BYTES});
      setText(part.next === undefined ? part.text : `${part.text}\n…`);
    } catch (error) {
      report(error);
    }
  };
  return html`<details onToggle=${load}><summary>Text of the file</summary>${text !== null && html`<pre dir="auto">${text}</pre>`}</details>`;
}
