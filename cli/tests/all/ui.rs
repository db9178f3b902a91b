//! Tests of `stoker ui` with a real API server.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::cluster_fixture::ClusterFixture;

/// A page, with the cookie that its URL gives.
struct Page {
    child: Child,
    address: String,
    cookie: String,
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Page {
    fn start(fixture: &ClusterFixture) -> Self {
        let arguments =
            ["ui", "--port", "0", "--allow-actions", "--output", "json", "-n", fixture.namespace];
        let mut command = fixture.stoker(fixture.plane.kubeconfig(), &arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        let url = started["url"].as_str().unwrap().strip_prefix("http://").unwrap();
        let (address, path) = url.split_once('/').unwrap();
        let mut page = Self { child, address: address.to_owned(), cookie: String::new() };
        let answer = page.get(&format!("/{path}"));
        let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
        page.cookie = cookie.split(';').next().unwrap().to_owned();
        page
    }

    /// Sends a request, and returns the response with its headers.
    fn send(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nCookie: {}\r\nConnection: close\r\n\
             Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\r\n{body}",
            self.address,
            self.cookie,
            body.len()
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    fn get(&self, path: &str) -> String {
        self.send("GET", path, "")
    }
}

/// Returns the value of a hidden field.
fn field<'a>(html: &'a str, name: &str) -> &'a str {
    let begin = format!("name=\"{name}\" value=\"");
    html.split_once(&begin).unwrap().1.split('"').next().unwrap()
}

#[test]
fn page_pauses_and_deletes_an_experiment() {
    let Some(fixture) = ClusterFixture::new("page") else { return };
    fixture.start_trial();
    fixture.start_job();
    let page = Page::start(&fixture);
    stoker_test_cluster::wait_until("the page lists the experiment and the job", || {
        let lists = page.get("/experiments.json") + &page.get("/jobs.json");
        let is_listed = lists.contains("\"mnist\"") && lists.contains("\"species\"");
        if is_listed { Ok(()) } else { Err(lists) }
    })
    .unwrap();
    let html = page.get("/experiments/page/mnist");
    let (token, uid) = (field(&html, "token"), field(&html, "uid"));
    let state = || fixture.object("experiment", "mnist")["spec"]["state"].clone();
    let pause = |token: &str, uid: &str| {
        let form = format!("token={token}&uid={uid}");
        let response = page.send("POST", "/experiments/page/mnist/actions/pause", &form);
        (response.lines().next().unwrap().to_owned(), state())
    };
    let active = state();
    assert_eq!(pause("wrong", uid), ("HTTP/1.1 403 Forbidden".to_owned(), active.clone()));
    assert_eq!(pause(token, "other"), ("HTTP/1.1 409 Conflict".to_owned(), active.clone()));
    // The API server itself refuses a patch for another object of the same name.
    let patch = json!({"metadata": {"uid": "other"}, "spec": {"state": "killed"}}).to_string();
    let patch = ["patch", "experiment", "mnist", "-n", "page", "--type=merge", "-p", &patch];
    let refused = fixture.plane.kubectl(&patch).unwrap_err().to_string();
    assert!(refused.contains("uid"), "{refused}");
    assert_eq!(state(), active);
    assert_eq!(pause(token, uid), ("HTTP/1.1 303 See Other".to_owned(), json!("paused")));
    let question = page.get("/experiments/page/mnist/actions/delete");
    assert!(question.contains("Files remain in"), "{question}");
    let delete = |name: &str| {
        let form = format!("token={token}&uid={uid}&name={name}");
        page.send("POST", "/experiments/page/mnist/actions/delete", &form)
    };
    assert!(delete("mnist2").starts_with("HTTP/1.1 422"));
    assert!(delete("mnist").starts_with("HTTP/1.1 303"));
    let gone = fixture.plane.get(&["experiment", "mnist", "-n", "page"]).unwrap_err().to_string();
    assert!(gone.contains("NotFound"), "{gone}");
    // Nodes can be listed with this kubeconfig; this API server has none.
    let slots = page.get("/cluster");
    assert!(slots.contains("Slots by node") && !slots.contains("you may not"), "{slots}");
}
