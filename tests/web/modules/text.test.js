import assert from "node:assert/strict";
import test from "node:test";
import { addressOf, conversationOf, directThread, nameThread, partiesOf } from "../../../web/page/core/text.js";

test("a conversation of two is named, answered and taken apart as the thread of these two", () => {
  const id = directThread("mia", "bob", "mia");
  assert.equal(id, "direct:bob~mia:mia");
  assert.deepEqual([partiesOf(id), conversationOf(id)], [["bob", "mia"], "mia"]);
  assert.equal(addressOf(id, "mia"), "agent:bob");
  assert.equal(nameThread({ thread_id: id }, "mia"), "bob · New conversation");
  assert.equal(nameThread({ thread_id: id, title: "bob · Tea?" }, "mia"), "bob · Tea?");
  assert.equal(directThread("mia", "bob"), "direct:bob~mia");
  assert.deepEqual([conversationOf("direct:bob~mia"), conversationOf("channel:a"), partiesOf("thread:5")], ["", "", []]);
  assert.equal(addressOf("mod:tasks~mia", "mia"), "mod:tasks");
});
