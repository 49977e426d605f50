// What the server remembers of the caller's tenant, and the button that has it forget.

import { getJson, remove } from "./api.js";

const byId = (id) => document.getElementById(id);

export async function showMemory(key) {
  let told;
  let known = false;
  try {
    const cache = await getJson("v1/cache", key);
    known = cache.texts !== null;
    told = inWords(cache);
  } catch (error) {
    told = error.message;
  }
  byId("memory").textContent = told;
  byId("forget").disabled = !known;
}

function inWords({ tenant, texts, tokens, bytes, quota_bytes: quota, ttl_s: ttl }) {
  if (tenant === null) return "Requests without a key belong to nobody: no answer is remembered, none is drafted from.";
  if (texts === null) return `Tenant ${tenant}: the replicas share nothing; each drafts from its own answers.`;
  const share = quota ? `, ${((100 * bytes) / quota).toFixed(1)} % of the quota` : "";
  const size = `${texts.toLocaleString("en")} answers with ${tokens.toLocaleString("en")} tokens${share}`;
  return `Tenant ${tenant}: ${size}, kept ${Math.round(ttl / 86400)} days. Race again: what was said once is drafted from here.`;
}

// notice: tells of an error.
export async function forgetAll(key, notice) {
  try {
    const { tenant } = await remove("v1/cache", key);
    byId("status").textContent = `All answers to tenant ${tenant} are forgotten.`;
  } catch (error) {
    notice(error.message);
  }
  await showMemory(key);
}
