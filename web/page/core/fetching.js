/**
 * Reads data that is out of date. Parts of the state that must be read again are marked in `stale`.
 *
 * Reads of one kind run one after the other. `apply` merges events that arrive during a read. An operator's page also
 * follows the log, because its list of threads includes threads whose messages are not delivered to it. This module
 * does not use the DOM, and its timers are a parameter.
 */

const THREADS_PAGE = 200;
const MAX_LISTED = 1000; // maximum number of threads to read again after a lost connection
const ROWS_AT_ONCE = 100;
const HISTORY_PAGE = 100;
const JUMP_PAGE = 500;
const MAX_JUMP = 12; // maximum number of pages to read back to a message
const STATUS_AT_ONCE = 5;
const LOG_WAIT_MS = 25_000;
const PAUSES_MS = { threads: 150, agents: 2000, inbox: 200, status: 300 };
const UNKNOWN = ["unknown_operation", "invalid_arguments", "forbidden"];

export class Fetching {
  /** `source` calls the hub, `getState` returns the newest state, and `dispatch` applies an event at once. */
  constructor({ source, getState, dispatch, timers = globalThis, pauses = PAUSES_MS }) {
    Object.assign(this, { _source: source, _getState: getState, _dispatch: dispatch, _timers: timers, _pauses: pauses });
    this._busy = new Set();
    this._timersOf = new Map();
    this._earlier = {}; // promises of running reads of earlier pages, by thread
    this._canReadRows = true; // whether this hub returns thread rows by id
    this._isOver = false;
  }

  /** Start the reads that the state needs after an event. */
  startReads(event) {
    if (this._isOver) return;
    if (event?.type === "welcome") this._startSession(event);
    const { stale, connection } = this._getState();
    if (connection !== "online") return;
    if (stale.threads || some(stale.rows)) this._schedule("threads", () => this._fetchThreads());
    if (stale.agents) this._schedule("agents", () => this._fetchAgents());
    if (stale.inbox) this._schedule("inbox", () => this._fetchInbox());
    if (some(stale.loaded)) this._schedule("history", () => this._fetchLoaded());
    if (some(stale.messages)) this._schedule("message", () => this._fetchOwn());
    if (some(stale.status)) this._schedule("status", () => this._fetchStatus());
  }

  close() {
    this._isOver = true;
    for (const timer of this._timersOf.values()) this._timers.clearTimeout(timer);
  }

  /** Read the next page of the list of threads. */
  async loadMoreThreads() {
    const rows = Object.values(this._getState().threads).filter((thread) => thread.last_seq);
    const before = Math.min(...rows.map((row) => row.last_seq));
    if (Number.isFinite(before)) await this._read("network.list_threads", { before, limit: THREADS_PAGE });
  }

  /** Read an earlier page of an open thread. Return whether the page has messages. */
  async loadEarlier(threadId, limit = HISTORY_PAGE) {
    const loaded = this._getState().threads[threadId]?.loaded;
    if (!loaded?.has_before || loaded.is_loading) return false;
    const args = { thread_id: threadId, before: loaded.complete_from, limit };
    // Run only one read per thread at a time. Scrolling requests pages often, and the pages of a thread must arrive in
    // order.
    this._earlier[threadId] ??= this._read("network.history", args).finally(() => delete this._earlier[threadId]);
    return (await this._earlier[threadId]).messages.length > 0;
  }

  /** Read back to a message, but at most MAX_JUMP pages. */
  async reach(threadId, seq) {
    for (let page = 0; page < MAX_JUMP; page += 1) {
      const loaded = this._getState().threads[threadId]?.loaded;
      if (!loaded || (!loaded.is_loading && (loaded.complete_from <= seq || !loaded.has_before))) return;
      if (loaded.is_loading) await this._waitUntilLoaded(threadId);
      else await this.loadEarlier(threadId, JUMP_PAGE);
    }
  }

  // --- sessions

  _startSession(welcome) {
    this._canReadRows = true;
    const lost = () => {}; // after a lost connection, the next session starts these reads again
    this._source.call("network.watch", { presence: true, signals: true }).catch(lost);
    if (welcome.is_operator && !this._isFollowing) {
      this._isFollowing = true;
      this._followLog().catch(lost).finally(() => (this._isFollowing = false));
    }
  }

  async _followLog() {
    for (let wait_ms = 0; !this._isOver; wait_ms = LOG_WAIT_MS) {
      const after = this._getState().log_at;
      const epoch = this._getState().network.epoch;
      try {
        const args = { after, limit: 500, wait_ms };
        const value = await this._source.call("network.log", args);
        // Ignore the answer if the history has changed, or if a full refetch has moved the position meanwhile.
        if (this._getState().network.epoch === epoch && this._getState().log_at === after) {
          this._dispatch({ type: "result", call: { op: "network.log", args }, value });
        }
      } catch (error) {
        // the caller is not an operator, or the connection was closed
        if (error.code === "closed" || UNKNOWN.includes(error.code)) return;
        await this._pause(1000);
      }
    }
  }

  // --- reads

  async _fetchThreads() {
    const { stale, threads } = this._getState();
    const rows = Object.keys(stale.rows);
    if (!stale.threads && rows.length <= ROWS_AT_ONCE && this._canReadRows) {
      // Dispatch before the request is sent. The answer may lack messages that arrive from now on, so these messages
      // are added to its counts.
      this._dispatch({ type: "fetching", what: "threads", ids: rows });
      try {
        await this._read("network.list_threads", { threads: rows, limit: rows.length });
      } catch (error) {
        this._dispatch({ type: "failed", what: "threads" });
        if (!UNKNOWN.includes(error.code)) throw error;
        this._canReadRows = false; // an older hub cannot return single rows, so read the whole list
        await this._fetchList(Object.keys(threads).length);
      }
    } else {
      await this._fetchList(Object.keys(threads).length);
    }
  }

  async _fetchList(count) {
    this._dispatch({ type: "fetching", what: "threads" });
    try {
      const rows = new Map();
      let before;
      let has_more = true;
      while (has_more && (before === undefined || rows.size < Math.min(count, MAX_LISTED))) {
        const page = await this._source.call("network.list_threads", { limit: THREADS_PAGE, before });
        // A thread that gets a message meanwhile may appear twice. Keep the first row of the thread, which is newer.
        for (const row of page.threads) if (!rows.has(row.thread_id)) rows.set(row.thread_id, row);
        before = page.threads.at(-1)?.last_seq;
        has_more = page.has_more && before !== undefined;
      }
      const value = { threads: [...rows.values()], has_more };
      this._dispatch({ type: "result", call: { op: "network.list_threads", args: { whole: true } }, value });
    } catch (error) {
      this._dispatch({ type: "failed", what: "threads" });
      throw error;
    }
  }

  async _fetchAgents() {
    this._dispatch({ type: "fetching", what: "agents" });
    const agents = [];
    let after = "";
    let has_more = true;
    while (has_more) {
      const page = await this._source.call("network.list_agents", { after });
      agents.push(...page.agents);
      after = page.agents.at(-1)?.agent_id;
      has_more = page.has_more && after !== undefined;
    }
    this._dispatch({ type: "result", call: { op: "network.list_agents", args: { whole: true } }, value: { agents } });
  }

  async _fetchInbox() {
    this._dispatch({ type: "fetching", what: "inbox" });
    try {
      await this._read("network.inbox", {});
    } catch {
      this._dispatch({ type: "failed", what: "inbox" });
    }
  }

  async _fetchLoaded() {
    for (const id of Object.keys(this._getState().stale.loaded)) {
      this._dispatch({ type: "fetching", what: "history", thread_id: id });
      try {
        await this._read("network.history", { thread_id: id, limit: HISTORY_PAGE });
      } catch (error) {
        const failure = { code: error.code, message: error.message };
        this._dispatch({ type: "failed", what: "history", thread_id: id, error: failure });
      }
    }
  }

  /** Read the user's own messages again, in the form in which the hub stored them. */
  async _fetchOwn() {
    for (const [seq, thread_id] of Object.entries(this._getState().stale.messages)) {
      this._dispatch({ type: "fetching", what: "message", seq: Number(seq) });
      await this._read("network.history", { thread_id, before: Number(seq) + 1, limit: 1 });
    }
  }

  /** Read the delivery status of the newest marked messages. The other messages stay marked for the next read. */
  async _fetchStatus() {
    const seqs = Object.keys(this._getState().stale.status).map(Number).sort((first, second) => second - first);
    for (const seq of seqs.slice(0, STATUS_AT_ONCE)) {
      this._dispatch({ type: "fetching", what: "status", seq });
      await this._read("network.message_status", { seq });
    }
  }

  async _read(op, args) {
    const value = await this._source.call(op, args);
    this._dispatch({ type: "result", call: { op, args }, value });
    return value;
  }

  // --- scheduling

  /** Run a read after a pause in which more marks are collected. Only one read per name runs at a time. */
  _schedule(name, run) {
    // Keep the marks in `stale`. `startReads` is called again when the current read has ended.
    if (this._busy.has(name)) return;
    this._busy.add(name);
    const start = async () => {
      this._timersOf.delete(name);
      try {
        await run();
      } catch {
        await this._pause(500); // the read was refused or the connection has ended; keep the marks
      }
      // Remove the name before starting reads again, because events during the read may have set new marks.
      this._busy.delete(name);
      this.startReads();
    };
    const isFirst = name === "agents" && !Object.keys(this._getState().agents).length; // the first screen needs the agents
    this._timersOf.set(name, this._timers.setTimeout(start, isFirst ? 0 : (this._pauses[name] ?? 0)));
  }

  _pause(ms) {
    return new Promise((resolve) => this._timers.setTimeout(resolve, ms));
  }

  _waitUntilLoaded(threadId) {
    return new Promise((resolve) => {
      const check = () => {
        const loaded = this._getState().threads[threadId]?.loaded;
        if (this._isOver || !loaded?.is_loading) resolve();
        else this._timers.setTimeout(check, 20);
      };
      check();
    });
  }
}

const some = (marks) => Object.keys(marks).length > 0;
