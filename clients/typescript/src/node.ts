/** Stores unsent messages in files. For Node only. */

import { createHash } from "node:crypto";
import { closeSync, fsyncSync, mkdirSync, openSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import type { OutboxStore } from "./client.ts";

/** Return an outbox that stores its messages in a folder. The folder must not be used for anything else. Each message
 * is a file that is on the disk before the message is sent. If the file cannot be written, the message is not sent, and
 * `send` rejects with the reason. */
export function fileStore(folder: string): OutboxStore {
  return new FileStore(folder);
}

class FileStore implements OutboxStore {
  readonly #folder: string;
  readonly #items = new Map<string, string>();

  constructor(folder: string) {
    this.#folder = folder;
    mkdirSync(folder, { recursive: true, mode: 0o700 });
    for (const name of readdirSync(folder).filter((file) => file.endsWith(".json"))) {
      try {
        const { key, value } = JSON.parse(readFileSync(join(folder, name), "utf8"));
        this.#items.set(key, value);
      } catch (error) {
        throw new Error(`${join(folder, name)} contains no message (${error}). Move it away to send the others.`, { cause: error });
      }
    }
  }

  get length(): number {
    return this.#items.size;
  }

  key(place: number): string | null {
    return [...this.#items.keys()][place] ?? null;
  }

  getItem(key: string): string | null {
    return this.#items.get(key) ?? null;
  }

  setItem(key: string, value: string): void {
    const path = this.#pathOf(key);
    const file = openSync(`${path}.new`, "w", 0o600);
    try {
      writeFileSync(file, JSON.stringify({ key, value })); // unlike `writeSync`, this writes all of the data
      fsyncSync(file);
    } catch (error) {
      rmSync(`${path}.new`, { force: true });
      throw error;
    } finally {
      closeSync(file);
    }
    renameSync(`${path}.new`, path);
    this.#syncFolder();
    this.#items.set(key, value);
  }

  /** Delete a file without syncing the folder. If the file reappears after a crash, its message is sent again under the
   * same id, which the hub recognizes. */
  removeItem(key: string): void {
    this.#items.delete(key);
    rmSync(this.#pathOf(key), { force: true });
  }

  #pathOf(key: string): string {
    return join(this.#folder, `${createHash("sha256").update(key).digest("hex")}.json`);
  }

  /** Sync the folder, so that the name of the new file is on the disk too. Windows has no such call. */
  #syncFolder(): void {
    if (process.platform === "win32") return;
    const folder = openSync(this.#folder, "r");
    try {
      fsyncSync(folder);
    } finally {
      closeSync(folder);
    }
  }
}
