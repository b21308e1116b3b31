/**
 * What is fetched when: looks at a state's `stale` marks and asks the hub for what they name. Reads of one kind follow
 * each other; what was heard while a read was under way is judged by `apply`. An operator's page follows the log
 * too, since it lists threads whose messages are not delivered to it. No DOM; timers are given.
 */

const THREADS_PAGE = 200;
const MAX_LISTED = 1000; // threads that are fetched again after a loss
const ROWS_AT_ONCE = 100;
const HISTORY_PAGE = 100;
const JUMP_PAGE = 500;
const MAX_JUMP = 12; // pages that are fetched to reach a message
const STATUS_AT_ONCE = 5;
const LOG_WAIT_MS = 25_000;
const PAUSES_MS = { threads: 150, agents: 2000, inbox: 200, status: 300 };
const UNKNOWN = ["unknown_operation", "invalid_arguments", "forbidden"];

export class Fetching {
  /** `source` calls; `getState` gives the newest state, `dispatch` applies an event at once. */
  constructor({ source, getState, dispatch, timers = globalThis, pauses = PAUSES_MS }) {
    Object.assign(this, { _source: source, _getState: getState, _dispatch: dispatch, _timers: timers, _pauses: pauses });
    this._busy = new Set();
    this._timersOf = new Map();
    this._earlier = {}; // of threads: the page that is under way
    this._namesRows = true; // whether this hub gives the rows of threads by name
    this._isOver = false;
  }

  /** Look at the state after an event was applied; begin what is to be fetched. */
  look(event) {
    if (this._isOver) return;
    if (event?.type === "welcome") this._begin(event);
    const { stale, connection } = this._getState();
    if (connection !== "online") return;
    if (stale.threads || some(stale.rows)) this._soon("threads", () => this._fetchThreads());
    if (stale.agents) this._soon("agents", () => this._fetchAgents());
    if (stale.inbox) this._soon("inbox", () => this._fetchInbox());
    if (some(stale.loaded)) this._soon("history", () => this._fetchLoaded());
    if (some(stale.messages)) this._soon("message", () => this._fetchOwn());
    if (some(stale.status)) this._soon("status", () => this._fetchStatus());
  }

  close() {
    this._isOver = true;
    for (const timer of this._timersOf.values()) this._timers.clearTimeout(timer);
  }

  /** A further page of the list of threads. */
  async loadMoreThreads() {
    const rows = Object.values(this._getState().threads).filter((it) => it.last_seq);
    const before = Math.min(...rows.map((it) => it.last_seq));
    if (Number.isFinite(before)) await this._read("network.list_threads", { before, limit: THREADS_PAGE });
  }

  /** An earlier page of an open thread, one at a time. Gives whether something came. */
  async loadEarlier(threadId, limit = HISTORY_PAGE) {
    const loaded = this._getState().threads[threadId]?.loaded;
    if (!loaded?.has_before || loaded.is_loading) return false;
    const args = { thread_id: threadId, before: loaded.complete_from, limit };
    this._earlier[threadId] ??= this._read("network.history", args).finally(() => delete this._earlier[threadId]);
    return (await this._earlier[threadId]).messages.length > 0;
  }

  /** Load down to a message, as far as that goes. */
  async reach(threadId, seq) {
    for (let page = 0; page < MAX_JUMP; page += 1) {
      const loaded = this._getState().threads[threadId]?.loaded;
      if (!loaded || (!loaded.is_loading && (loaded.complete_from <= seq || !loaded.has_before))) return;
      if (loaded.is_loading) await this._loaded(threadId);
      else await this.loadEarlier(threadId, JUMP_PAGE);
    }
  }

  // --- sessions

  _begin(welcome) {
    this._namesRows = true;
    const lost = () => {}; // a connection that ends begins anew
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
        // of another history, or beside a refetch that has begun anew: ask again
        if (this._getState().network.epoch === epoch && this._getState().log_at === after) {
          this._dispatch({ type: "result", call: { op: "network.log", args }, value });
        }
      } catch (error) {
        if (error.code === "closed" || UNKNOWN.includes(error.code)) return; // no operator
        await this._pause(1000);
      }
    }
  }

  // --- reads

  async _fetchThreads() {
    const { stale, threads } = this._getState();
    const rows = Object.keys(stale.rows);
    if (!stale.threads && rows.length <= ROWS_AT_ONCE && this._namesRows) {
      this._dispatch({ type: "fetching", what: "threads", ids: rows });
      try {
        await this._read("network.list_threads", { threads: rows, limit: rows.length });
      } catch (error) {
        this._dispatch({ type: "failed", what: "threads" });
        if (!UNKNOWN.includes(error.code)) throw error;
        this._namesRows = false; // an older hub: the whole list
        await this._fetchList(Object.keys(threads).length);
      }
    } else {
      await this._fetchList(Object.keys(threads).length);
    }
  }

  async _fetchList(known) {
    this._dispatch({ type: "fetching", what: "threads" });
    try {
      const found = new Map();
      let before;
      let has_more = true;
      while (has_more && (before === undefined || found.size < Math.min(known, MAX_LISTED))) {
        const page = await this._source.call("network.list_threads", { limit: THREADS_PAGE, before });
        for (const row of page.threads) if (!found.has(row.thread_id)) found.set(row.thread_id, row);
        before = page.threads.at(-1)?.last_seq;
        has_more = page.has_more && before !== undefined;
      }
      const value = { threads: [...found.values()], has_more };
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
        const told = { code: error.code, message: error.message };
        this._dispatch({ type: "failed", what: "history", thread_id: id, error: told });
      }
    }
  }

  /** Messages of one's own, as the hub stored them. */
  async _fetchOwn() {
    for (const [seq, thread_id] of Object.entries(this._getState().stale.messages)) {
      this._dispatch({ type: "fetching", what: "message", seq: Number(seq) });
      await this._read("network.history", { thread_id, before: Number(seq) + 1, limit: 1 });
    }
  }

  /** Of the newest ones; the others stay marked, and are next. */
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

  // --- when

  /** Run a read after a pause, in which more may come together; one at a time of each name. */
  _soon(name, run) {
    if (this._busy.has(name)) return;
    this._busy.add(name);
    const start = async () => {
      this._timersOf.delete(name);
      try {
        await run();
      } catch {
        await this._pause(500); // refused, or the connection has ended for good: what is stale stays so
      }
      this._busy.delete(name);
      this.look();
    };
    const isFirst = name === "agents" && !Object.keys(this._getState().agents).length; // the first screen shows them
    this._timersOf.set(name, this._timers.setTimeout(start, isFirst ? 0 : (this._pauses[name] ?? 0)));
  }

  _pause(ms) {
    return new Promise((resolve) => this._timers.setTimeout(resolve, ms));
  }

  _loaded(threadId) {
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
