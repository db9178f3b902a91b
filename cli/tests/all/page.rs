//! Tests of the web page over HTTP, without a browser.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fixture::{RunFixture, check, files, output_text, random, signal, stoker, wait_until};

/// Address and token of a page.
struct Page {
    address: String,
    token: String,
}

impl Page {
    fn of(url: &str) -> Self {
        let rest = url.trim().strip_prefix("http://").unwrap();
        let (address, token) = rest.split_once("/?token=").unwrap();
        Self { address: address.to_owned(), token: token.to_owned() }
    }

    /// Sends a request with these headers. Returns status, head and body.
    fn request(&self, path: &str, headers: &str) -> (u16, String, String) {
        self.send("GET", path, headers, "")
    }

    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\n{headers}Connection: close\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), head.to_owned(), body.to_owned())
    }

    fn headers(&self) -> String {
        let port = self.address.rsplit(':').next().unwrap();
        format!("Host: {}\r\nCookie: stoker-{port}={}\r\n", self.address, self.token)
    }

    fn get(&self, path: &str) -> String {
        let (status, _, body) = self.request(path, &self.headers());
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Sends the form of an action. Returns the status.
    fn act(&self, base: &str, action: &str, more: &str) -> u16 {
        let path = format!("{base}/actions/{action}");
        // Each form has the same token, but not each state has the same forms.
        let question =
            |action: &str| self.request(&format!("{base}/actions/{action}"), &self.headers()).2;
        let html = self.get(base) + &question(action) + &question("delete");
        let field = |name: &str| {
            let begin = format!("name=\"{name}\" value=\"");
            html.split_once(&begin).and_then(|(_, rest)| rest.split('"').next()).unwrap_or_default()
        };
        let form = format!("token={}&uid={}{more}", field("token"), field("uid"));
        let (status, _, body) = self.send("POST", &path, &self.headers(), &form);
        // A failed test prints the reason.
        println!("{action}: {body}");
        status
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.get(path)).unwrap()
    }
}

/// A process that ends with this value, also if a test fails.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `stoker ui` for a directory.
fn serve(root: &Path) -> (Process, Page) {
    serve_with(root, &[])
}

/// Same as [`serve`], with more options.
fn serve_with(root: &Path, more: &[&str]) -> (Process, Page) {
    let mut command = stoker();
    command.args(["ui", "--port", "0", "--output", "json", "--root"]).arg(root).args(more);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut process = Process(child);
    let mut line = String::new();
    BufReader::new(process.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let url = serde_json::from_str::<Value>(&line).unwrap()["url"].as_str().unwrap().to_owned();
    (process, Page::of(&url))
}

#[test]
fn page_shows_what_the_record_contains() {
    let fixture = RunFixture::new(random(3), "");
    assert!(fixture.run(&[]).status.success());
    let (_process, page) = serve(&fixture.root());
    let base = "/experiments/default/scripted";
    wait_until("the run is on the page", || page.request(base, &page.headers()).0 == 200);
    let data = page.json(&format!("{base}/data.json"));
    let trials = fixture.trials();
    for (index, trial) in trials.iter().enumerate() {
        let result = &trial["status"]["facts"][0]["result"];
        let metric: f64 = result["metric"].as_str().unwrap().parse().unwrap();
        assert_eq!(data["trials"]["results"][index], json!([[result["units"], metric]]));
        assert_eq!(data["trials"]["hp"]["x"][index], trial["spec"]["hyperparameters"]["x"]);
        assert_eq!(data["trials"]["state"][index], "Completed");
    }
    assert_eq!((&data["phase"], &data["isLive"]), (&json!("Completed"), &json!(false)));
    check_first_change(&page);
    let csv = page.get(&format!("{base}/trials.csv"));
    assert_eq!(csv.lines().count(), 4, "{csv}");
    let (trial, name) = fixture.checkpoints().into_iter().next().unwrap();
    check_download(&page, &fixture, trial, &name);
    let log = page.get(&format!("{base}/trials/{trial}/logs.txt"));
    assert!(log.contains("attempt 0 trains"), "{log}");
}

/// Checks that a stream begins with a change if one was made since its page, and only then.
fn check_first_change(page: &Page) {
    let html = page.get("/experiments");
    let (_, rest) = html.split_once("data-live=\"").unwrap();
    let own = rest.split('"').next().unwrap().replace("&amp;", "&");
    let is_event = |line: &String| line.starts_with("event: ");
    let events = |path: &str, headers: &str| {
        let lines = BufReader::new(stream_with(page, path, headers)).lines();
        lines.map(Result::unwrap).filter(is_event)
    };
    let is_change = |event: String| event == "event: change";
    // A heartbeat comes every five seconds.
    assert!(events("/live?v=0.0", "").take(20).any(is_change));
    assert!(events(&own, "Last-Event-ID: 0.0\r\n").take(20).any(is_change));
    assert!(!events(&own, "").take(2).any(is_change), "{own}");
}

/// Checks that files of a manifest can be downloaded, and no others.
fn check_download(page: &Page, fixture: &RunFixture, trial: u64, name: &str) {
    let folder = format!("/experiments/default/scripted/trials/{trial}/checkpoints/{name}");
    // The manifest of the scripted trainer is empty, and has another hash than in its report.
    let html = page.get(&folder);
    assert!(html.contains("missing field"), "{folder}");
    let (_, command) = html.split_once("stoker checkpoint download ").unwrap();
    let command = format!("checkpoint download {}", command.split('<').next().unwrap());
    let mut stoker = stoker();
    stoker.args(command.split_whitespace()).current_dir(fixture.root());
    let output = stoker.output().unwrap();
    let text = output_text(&output);
    assert!(text.contains("manifest.json of the checkpoint is corrupt"), "{text}");
    let model = fixture.model(trial, name);
    let manifest = json!({
        "format": 1, "experimentId": "", "trial": trial, "attempt": 0, "batches": 10,
        "files": {"model": {"bytes": model.len(), "sha256": "0"}},
    });
    let run = files(&fixture.root().join("default")).remove(0);
    let path = run.join(format!("trials/{trial}/checkpoints/{name}/manifest.json"));
    std::fs::write(path, manifest.to_string()).unwrap();
    assert_eq!(page.get(&format!("{folder}/files/model")), model);
    for file in ["../../../record.json", "..%2f..%2f..%2frecord.json", "manifest.json"] {
        let (status, _, body) = page.request(&format!("{folder}/files/{file}"), &page.headers());
        assert_eq!(status, 404, "{file}: {body}");
    }
}

#[test]
fn page_steers_a_local_run() {
    let base = "/experiments/default/scripted";
    let fixture = RunFixture::new(random(2), "").pause_at(7);
    let mut child = Process(fixture.start());
    fixture.wait_for_batch(7);
    let phase = || fixture.experiment()["status"]["phase"].clone();
    let on_page = |page: &Page| page.request(base, &page.headers()).0 == 200;
    let (_process, page) = serve(&fixture.root());
    wait_until("the run is on the page", || on_page(&page));
    assert_eq!(page.act(base, "pause", ""), 403);
    let (_process, page) = serve_with(&fixture.root(), &["--allow-actions"]);
    wait_until("the run is on the page", || on_page(&page));
    assert_eq!(page.act(base, "pause", ""), 303);
    wait_until("the run pauses", || phase() == "Paused");
    // The runner holds the record.
    assert_eq!(page.act(base, "delete", "&name=scripted"), 409);
    fixture.release();
    wait_until("the page shows the pause", || page.get(base).contains("actions/activate"));
    assert_eq!(page.act(base, "activate", ""), 303);
    assert!(child.0.wait().unwrap().success());
    wait_until("the page shows the end", || page.get(base).contains("actions/delete"));
    assert_eq!(phase(), "Completed");
    let question = page.get(&format!("{base}/actions/delete"));
    assert!(question.contains("Files are deleted from"), "{question}");
    assert_eq!(page.act(base, "delete", "&name=scripted"), 303);
    fixture.check("experiment list", 0, "no experiments in");
}

/// Without a runner, the page changes the record itself.
#[test]
fn page_steers_a_stopped_run() {
    let base = "/experiments/default/scripted";
    let fixture = RunFixture::new(random(2), "").pause_at(7);
    let mut child = Process(fixture.start());
    fixture.wait_for_batch(7);
    signal(&child.0, rustix::process::Signal::TERM);
    child.0.wait().unwrap();
    let (_process, page) = serve_with(&fixture.root(), &["--allow-actions"]);
    wait_until("the run is on the page", || page.request(base, &page.headers()).0 == 200);
    let state = || fixture.experiment()["spec"]["state"].clone();
    assert_eq!(page.act(base, "pause", ""), 303);
    assert_eq!(state(), "paused");
    assert!(page.get(base).contains("no runner is alive"), "{}", page.get(base));
    wait_until("the page shows the pause", || page.get(base).contains("actions/activate"));
    assert_eq!(page.act(base, "activate", ""), 303);
    assert_eq!(state(), "active");
    wait_until("the page shows the activation", || !page.get(base).contains("actions/activate"));
    assert_eq!(page.act(base, "cancel", ""), 303);
    assert_eq!(fixture.experiment()["status"]["phase"], "Cancelled");
    // A later run with the name leaves the deletion only.
    let id = page.json("/experiments.json")[0]["id"].as_str().unwrap().to_owned();
    fixture.release();
    assert!(fixture.run(&["--fresh"]).status.success());
    let replaced = format!("/experiments/default/{id}");
    let note = "a later run has this name";
    wait_until("the run is replaced", || page.get(&replaced).contains(note));
    assert_eq!(page.act(&replaced, "kill", ""), 403);
    assert_eq!(page.act(&replaced, "delete", "&name=scripted"), 303);
    fixture.check("experiment describe scripted", 0, "Completed");
}

#[test]
fn page_refuses_requests_without_its_token() {
    let folder = tempfile::tempdir().unwrap();
    let (_process, page) = serve(folder.path());
    let host = format!("Host: {}\r\n", page.address);
    let check = |path: &str, headers: &str, expected: u16| {
        let (status, head, _) = page.request(path, headers);
        assert_eq!(status, expected, "{path} {headers}");
        assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
        head
    };
    check("/experiments", &host, 403);
    check("/assets/app.js", &host, 403);
    check("/experiments", &format!("{host}Cookie: stoker-0={}\r\n", page.token), 403);
    check("/experiments", &page.headers().replace(&page.address, "evil.example"), 403);
    check("/experiments?token=0", &host, 403);
    let head = check(&format!("/experiments?token={}", page.token), &host, 303);
    assert!(head.contains("location: /experiments\r\n"), "{head}");
    assert!(head.contains("HttpOnly; SameSite=Strict"), "{head}");
    check("/experiments", &page.headers(), 200);
}

#[test]
fn run_without_a_port_for_its_page_creates_nothing() {
    let fixture = RunFixture::new(random(1), "");
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let flag = format!("--ui={}", other.local_addr().unwrap().port());
    check(&fixture.run(&[&flag]), 1, "choose another port: --ui=PORT");
    assert_eq!(fixture.check("experiment list -o name", 0, ""), "");
}

#[test]
fn run_serves_its_page_while_it_lasts() {
    let fixture = RunFixture::new(random(1), "").pause_at(3);
    let mut command = fixture.command(&["--ui=0", "--allow-actions"]);
    let run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Process(run);
    let mut lines = BufReader::new(run.0.stderr.take().unwrap()).lines();
    let url = lines.find_map(|line| line.unwrap().strip_prefix("page: ").map(str::to_owned));
    let page = Page::of(&url.unwrap());
    let states = || page.json("/experiments/default/scripted/data.json")["trials"]["state"].clone();
    let base = "/experiments/default/scripted";
    wait_until("the run is on the page", || page.request(base, &page.headers()).0 == 200);
    wait_until("the trial runs", || states() == json!(["Running"]));
    assert!(page.get(base).contains("actions/cancel"), "{}", page.get(base));
    let mut events = BufReader::new(stream(&page, "/live?e=default/scripted")).lines();
    assert!(events.any(|line| line.unwrap() == "event: heartbeat"));
    // The trial is held, so its record changes only here: the stream reports it without a request.
    let run_of = |path: &PathBuf| path.join("record/trials/0.json");
    let record = files(&fixture.root().join("local")).iter().map(run_of).find(|path| path.exists());
    let record = record.unwrap();
    let changed = record.with_extension("changed");
    std::fs::copy(&record, &changed).unwrap();
    std::fs::rename(&changed, &record).unwrap();
    assert!(events.any(|line| line.unwrap() == "event: change"));
    fixture.release();
    assert!(run.0.wait().unwrap().success());
    assert!(TcpStream::connect(&page.address).is_err());
}

/// Opens a stream of events.
fn stream(page: &Page, path: &str) -> TcpStream {
    stream_with(page, path, "")
}

/// Same as [`stream`], with further headers.
fn stream_with(page: &Page, path: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&page.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\n{}{headers}\r\n", page.headers()).unwrap();
    stream
}
