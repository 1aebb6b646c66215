// This page needs no service worker. The one of `moaspec target-server --page` would go on showing
// that page where another command serves this address now; it takes this script as its update.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(leave()));

async function leave() {
  const names = await caches.keys();
  const ours = names.filter((name) => name.startsWith("moaspec-"));
  await Promise.all(ours.map((name) => caches.delete(name)));
  await self.registration.unregister();
  const pages = await self.clients.matchAll({ type: "window" });
  await Promise.all(pages.map((page) => page.navigate(page.url)));
}
