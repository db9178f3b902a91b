// Creates a container in Azurite: node -e "$(cat container.js)" PORT NAME. Account and key are
// Azurite's defaults.
const crypto = require("crypto"), http = require("http");
const [port, name] = process.argv.slice(1);
const account = "devstoreaccount1";
const key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const headers = { "x-ms-date": new Date().toUTCString(), "x-ms-version": "2021-12-02", "content-length": 0 };
const signed = `PUT${"\n".repeat(12)}x-ms-date:${headers["x-ms-date"]}\nx-ms-version:${headers["x-ms-version"]}\n/${account}/${account}/${name}\nrestype:container`;
const signature = crypto.createHmac("sha256", Buffer.from(key, "base64")).update(signed).digest("base64");
headers.authorization = `SharedKey ${account}:${signature}`;
const request = http.request({ host: "127.0.0.1", port, method: "PUT", path: `/${account}/${name}?restype=container`, headers }, (response) => {
    response.pipe(process.stdout);
    process.exitCode = response.statusCode === 201 ? 0 : 1;
});
request.on("error", (error) => { console.log(error.message); process.exitCode = 1; });
request.end();
