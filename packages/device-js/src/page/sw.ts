/** Service worker: keeps the page's files, so that it opens without a network. */

/** Set by the server in front of this script. */
interface PageFiles {
  /** Changes when any file does. */
  readonly version: string;
  readonly paths: readonly string[];
}

/** The part of a service worker's global scope that this script uses. */
interface Scope {
  readonly MOASPEC: PageFiles;
  readonly clients: { claim(): Promise<void> };
  readonly location: Location;
  skipWaiting(): Promise<void>;
  addEventListener(name: string, listener: (event: any) => void): void;
}

const scope = self as unknown as Scope;
const PREFIX = "moaspec-page-";
const CACHE = PREFIX + scope.MOASPEC.version;
const PATHS = new Set(scope.MOASPEC.paths);

async function install(): Promise<void> {
  const cache = await caches.open(CACHE);
  await cache.addAll(scope.MOASPEC.paths.map((path) => new Request(path, { cache: "no-cache" })));
  await scope.skipWaiting();
}

async function activate(): Promise<void> {
  const names = await caches.keys();
  const old = names.filter((name) => name.startsWith(PREFIX) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await scope.clients.claim();
}

async function answer(request: Request): Promise<Response> {
  const cache = await caches.open(CACHE);
  return (await cache.match(request, { ignoreSearch: true, ignoreVary: true })) ?? fetch(request);
}

scope.addEventListener("install", (event) => event.waitUntil(install()));
scope.addEventListener("activate", (event) => event.waitUntil(activate()));
scope.addEventListener("fetch", (event) => {
  const { request } = event as { request: Request };
  const { origin, pathname } = new URL(request.url);
  const isOurs = request.method === "GET" && origin === scope.location.origin && PATHS.has(pathname);
  if (isOurs) event.respondWith(answer(request));
});
