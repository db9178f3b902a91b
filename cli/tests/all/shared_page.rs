//! Tests of the page that many viewers share, with a real API server.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stoker_test_cluster::{PATIENCE, Request, wait_until, wait_within};

use crate::cluster_fixture::ClusterFixture;
use crate::object_server::ObjectServer;

/// Resources that the page lists and watches.
const KINDS: &str = "experiments.stoker.dev,trials.stoker.dev,inferencejobs.stoker.dev";
/// Time after which withdrawn permissions must have an effect, twice the documented minute.
const WITHDRAWN: Duration = Duration::from_secs(120);

/// A page for all who sign in.
struct Page {
    child: Child,
    address: String,
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Page {
    /// Starts a page with the address of the API server only: the credentials of the kubeconfig
    /// must not matter.
    fn start(fixture: &ClusterFixture, namespaces: &str, more: &[&str]) -> Self {
        let arguments = ["ui", "--sign-in", "form", "--port", "0", "--output", "json"];
        let arguments = [&arguments[..], &["--offer-namespaces", namespaces], more].concat();
        let mut command = fixture.stoker(fixture.plane.kubeconfig(), &arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        let url = started["url"].as_str().unwrap();
        let address = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
        Self { child, address }
    }

    /// Sends a request. The stream contains the response.
    fn request(&self, method: &str, path: &str, cookie: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nCookie: {cookie}\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        )
        .unwrap();
        stream
    }

    /// Sends a request, and returns the response with its headers.
    fn send(&self, method: &str, path: &str, cookie: &str, body: &str) -> String {
        let mut response = String::new();
        self.request(method, path, cookie, body).read_to_string(&mut response).unwrap();
        response
    }

    fn sign_in(&self, token: &str) -> Result<Viewer<'_>, String> {
        let response = self.send("POST", "/sign-in", "", &format!("token={token}"));
        let cookie = response.lines().find_map(|line| line.strip_prefix("set-cookie: "));
        let cookie = cookie.and_then(|cookie| cookie.split(';').next()).map(str::to_owned);
        Ok(Viewer { page: self, cookie: cookie.ok_or(response)? })
    }
}

/// A signed-in viewer.
struct Viewer<'a> {
    page: &'a Page,
    cookie: String,
}

impl Viewer<'_> {
    fn get(&self, path: &str) -> String {
        self.page.send("GET", path, &self.cookie, "")
    }

    /// Returns the status of a page.
    fn status(&self, path: &str) -> String {
        let response = self.get(path);
        response.split(' ').nth(1).unwrap_or_default().to_owned()
    }

    /// Returns the namespaces of the shown experiments and jobs.
    fn shown(&self) -> [Vec<String>; 2] {
        ["/experiments.json", "/jobs.json"].map(|path| {
            let response = self.get(path);
            let body = response.split_once("\r\n\r\n").unwrap_or_default().1;
            let rows: Vec<Value> = serde_json::from_str(body).unwrap_or_default();
            let name = |row: &Value| row["namespace"].as_str().unwrap_or_default().to_owned();
            let mut names: Vec<String> = rows.iter().map(name).collect();
            names.sort();
            names
        })
    }

    /// Sends a form with the token of the session.
    fn post(&self, path: &str, form: &str) -> String {
        let html = self.get("/namespaces");
        let csrf = html.split_once("name=\"csrf\" value=\"").unwrap().1;
        let csrf = csrf.split('"').next().unwrap();
        self.page.send("POST", path, &self.cookie, &format!("csrf={csrf}&token={csrf}&{form}"))
    }
}

/// Creates a service account, and returns its token.
fn account(fixture: &ClusterFixture, name: &str) -> String {
    let create = ["create", "serviceaccount", name, "-n", fixture.namespace];
    fixture.plane.kubectl(&create).unwrap();
    fixture.plane.token(fixture.namespace, name, None).unwrap()
}

/// Lets an account of a namespace use verbs in a namespace.
fn grant(of: &ClusterFixture, account: &str, to: &str, verbs: &str, resources: &str) {
    let name = format!("{account}-{}-{verbs}", resources.split('.').next().unwrap());
    let name = name.replace(',', "-");
    let (verbs, resources) = (format!("--verb={verbs}"), format!("--resource={resources}"));
    of.plane.kubectl(&["create", "role", &name, "-n", to, &verbs, &resources]).unwrap();
    let (role, who) =
        (format!("--role={name}"), format!("--serviceaccount={}:{account}", of.namespace));
    of.plane.kubectl(&["create", "rolebinding", &name, "-n", to, &role, &who]).unwrap();
}

/// Waits until a viewer sees experiments and jobs of exactly these namespaces.
fn wait_for(viewer: &Viewer<'_>, experiments: &[&str], jobs: &[&str]) {
    wait_within(WITHDRAWN, "the viewer sees these namespaces", || {
        let shown = viewer.shown();
        if shown == [experiments, jobs] { Ok(()) } else { Err(format!("{shown:?}")) }
    })
    .unwrap();
}

#[test]
fn viewers_see_and_change_what_their_roles_allow() {
    let Some(one) = ClusterFixture::new("shared-a") else { return };
    let Some(two) = ClusterFixture::new("shared-b") else { return };
    for fixture in [&one, &two] {
        fixture.start_trial();
        fixture.start_job();
    }
    let (ada, grace) = (account(&one, "ada"), account(&one, "grace"));
    grant(&one, "ada", "shared-a", "list,watch", KINDS);
    grant(&one, "ada", "shared-a", "get,patch", "experiments.stoker.dev");
    let records = "experiments.stoker.dev,trials.stoker.dev";
    grant(&one, "grace", "shared-a", "list,watch", records);
    grant(&one, "grace", "shared-b", "list,watch", KINDS);
    let page = Page::start(&one, "shared-a", &["--allow-actions"]);
    // Neither a wrong token nor the credentials of the kubeconfig are accepted.
    let refused = page.sign_in("wrong").err().unwrap();
    assert!(
        refused.starts_with("HTTP/1.1 401") && refused.contains("does not accept"),
        "{refused}"
    );
    assert!(page.send("GET", "/experiments.json", "", "").starts_with("HTTP/1.1 401"));
    let (ada, grace) = (page.sign_in(&ada).unwrap(), page.sign_in(&grace).unwrap());
    wait_for(&ada, &["shared-a"], &["shared-a"]);
    wait_for(&grace, &["shared-a"], &[]);
    assert!(grace.get("/jobs").contains("you may not list inferencejobs in namespace shared-a"));
    // A viewer adds a namespace; without permission, it stays hidden.
    for viewer in [&ada, &grace] {
        assert!(viewer.post("/namespaces", "name=shared-b").starts_with("HTTP/1.1 303"));
    }
    wait_for(&grace, &["shared-a", "shared-b"], &["shared-b"]);
    wait_for(&ada, &["shared-a"], &["shared-a"]);
    let missing = "you may not list experiments in namespace shared-b";
    assert!(ada.get("/namespaces").contains(missing));
    assert_eq!(ada.status("/experiments/shared-b/mnist"), "404");
    assert_eq!(grace.status("/experiments/shared-b/mnist"), "200");
    // Actions need the permission of the viewer.
    let uid = one.object("experiment", "mnist")["metadata"]["uid"].as_str().unwrap().to_owned();
    let pause = |viewer: &Viewer<'_>| {
        viewer.post("/experiments/shared-a/mnist/actions/pause", &format!("uid={uid}"))
    };
    let state = || one.object("experiment", "mnist")["spec"]["state"].clone();
    let before = state();
    assert!(grace.get("/experiments/shared-a/mnist").contains("you may not patch"));
    assert!(pause(&grace).starts_with("HTTP/1.1 403"));
    assert_eq!(state(), before);
    assert!(pause(&ada).starts_with("HTTP/1.1 303"));
    assert_eq!(state(), "paused");
    // Withdrawn permissions take effect, and the watch continues with the other viewer's token.
    let name = "grace-experiments-list-watch";
    one.plane.kubectl(&["delete", "rolebinding", name, "-n", "shared-a"]).unwrap();
    wait_for(&grace, &["shared-b"], &["shared-b"]);
    let delete = ["delete", "experiment", "mnist", "-n", "shared-a"];
    one.plane.kubectl(&delete).unwrap();
    wait_for(&ada, &[], &["shared-a"]);
    // After the sign-out, the cookie is refused.
    assert!(ada.post("/sign-out", "").starts_with("HTTP/1.1 303"));
    assert_eq!(ada.status("/experiments.json"), "401");
    assert_eq!(grace.shown()[0], ["shared-b"]);
}

#[test]
fn storage_opens_with_the_secret_of_the_viewer() {
    let Some(one) = ClusterFixture::new("secret-a") else { return };
    let Some(two) = ClusterFixture::new("secret-b") else { return };
    let (may, may_not) = (account(&one, "may"), account(&one, "may-not"));
    // Each namespace has a storage with separate credentials.
    let keys = ["key-a", "key-b"];
    let servers = [(&one, keys[0]), (&two, keys[1])].map(|(fixture, key)| {
        fixture.start_trial();
        let server = ObjectServer::start(fixture.path("store"), key);
        let literals =
            [format!("AWS_ACCESS_KEY_ID={key}"), "AWS_SECRET_ACCESS_KEY=hidden".to_owned()];
        let literals = literals.map(|literal| format!("--from-literal={literal}"));
        let create = ["create", "secret", "generic", "s3", "-n", fixture.namespace];
        fixture
            .plane
            .kubectl(&[&create[..], &literals.each_ref().map(String::as_str)].concat())
            .unwrap();
        let storage = json!({"url": "s3://bucket", "endpoint": server.endpoint,
            "secretName": "s3", "path": "mnist"});
        fixture.set_status("experiment", "mnist", &json!({ "storage": storage }));
        for account in ["may", "may-not"] {
            grant(&one, account, fixture.namespace, "list,watch", KINDS);
        }
        grant(&one, "may", fixture.namespace, "get", "secrets");
        server
    });
    let page = Page::start(&one, "secret-a,secret-b", &[]);
    let (may, may_not) = (page.sign_in(&may).unwrap(), page.sign_in(&may_not).unwrap());
    let both = ["secret-a", "secret-b"];
    wait_for(&may, &both, &[]);
    wait_for(&may_not, &both, &[]);
    let paths = ["curves.json", "trials/0/curves.json", "trials/0/logs.json", "trials/0/logs.txt"];
    for namespace in both {
        wait_until("the record names the storage", || {
            let curves = may.get(&format!("/experiments/{namespace}/mnist/curves.json"));
            if curves.starts_with("HTTP/1.1 200") { Ok(()) } else { Err(curves) }
        })
        .unwrap();
        let of = |viewer: &Viewer<'_>, path: &str| {
            viewer.get(&format!("/experiments/{namespace}/mnist/{path}"))
        };
        for path in paths {
            let shown = of(&may, path);
            assert!(shown.starts_with("HTTP/1.1 200"), "{path}: {shown}");
            let hidden = of(&may_not, path);
            let is_refused = hidden.starts_with("HTTP/1.1 502")
                && hidden.contains("you may not read the Secret s3")
                && hidden.contains("is forbidden");
            assert!(is_refused, "{path}: {hidden}");
        }
        let logs = of(&may, "trials/0/logs.txt");
        assert!(logs.contains("first\n") && logs.contains("second\n"), "{logs}");
        assert!(of(&may, "trials/0/curves.json").contains("1.5"));
        // The record is shown.
        let trials = of(&may_not, "trials.json");
        assert!(trials.contains("\"x\":0.25"), "{trials}");
        let page = of(&may_not, "trials/0/checkpoints/000000000010-0");
        assert!(page.starts_with("HTTP/1.1 200") && page.contains("is forbidden"), "{page}");
    }
    assert!(servers.iter().all(|server| server.num_requests() > 0));
}

/// Returns the requests of the service accounts of a namespace for its experiments and trials.
fn requests(fixture: &ClusterFixture, verb: &str) -> Vec<Request> {
    let users = format!("system:serviceaccount:{}:", fixture.namespace);
    let mut requests = fixture.plane.requests().unwrap();
    requests.retain(|request| {
        request.verb == verb && request.group == "stoker.dev" && request.user.starts_with(&users)
    });
    requests
}

/// A page that is open: an experiment's stream of live updates.
struct Live(BufReader<TcpStream>);

impl Live {
    /// Loads the page of an experiment, and opens its stream.
    fn open(viewer: &Viewer<'_>, path: &str) -> Self {
        let html = viewer.get(path);
        let url = html.split_once("data-live=\"").unwrap_or_else(|| panic!("{html}")).1;
        let url = url.split('"').next().unwrap().replace("&#38;", "&");
        let stream = viewer.page.request("GET", &url, &viewer.cookie, "");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut live = Self(BufReader::new(stream));
        live.wait_for("heartbeat");
        live
    }

    fn wait_for(&mut self, event: &str) {
        let expected = format!("event: {event}\n");
        let end = Instant::now() + PATIENCE;
        let mut line = String::new();
        while line != expected {
            // Heartbeats never stop.
            assert!(Instant::now() < end, "the event {event} does not come");
            line.clear();
            let length = self.0.read_line(&mut line).unwrap();
            assert!(length > 0, "the stream ends before the event {event}");
        }
    }
}

/// Number of viewers. Each of the accounts signs in several times.
const VIEWERS: usize = 100;
const ACCOUNTS: usize = 20;

#[test]
fn viewers_share_lists_and_watches() {
    let Some(fixture) = ClusterFixture::new("shared-many") else { return };
    fixture.start_trial();
    let group = "--group=system:serviceaccounts:shared-many";
    let create = |arguments: &[&str]| fixture.plane.kubectl(arguments).unwrap();
    let resources = format!("--resource={KINDS}");
    create(&["create", "role", "see", "-n", "shared-many", "--verb=list,watch", &resources]);
    create(&["create", "rolebinding", "see", "-n", "shared-many", "--role=see", group]);
    let tokens: Vec<String> =
        (0..ACCOUNTS).map(|at| account(&fixture, &format!("viewer-{at}"))).collect();
    let page = Page::start(&fixture, "shared-many", &[]);
    let started = Instant::now();
    let first = page.sign_in(&tokens[0]).unwrap();
    wait_for(&first, &["shared-many"], &[]);
    let with_one = requests(&fixture, "list").len();
    assert_eq!(with_one, 3, "experiments, trials and jobs are listed once");
    let viewers: Vec<Viewer<'_>> =
        (1..VIEWERS).map(|at| page.sign_in(&tokens[at % ACCOUNTS]).unwrap()).collect();
    let mut pages: Vec<Live> = std::iter::once(&first)
        .chain(&viewers)
        .map(|viewer| {
            wait_for(viewer, &["shared-many"], &[]);
            Live::open(viewer, "/experiments/shared-many/mnist")
        })
        .collect();
    assert_eq!(requests(&fixture, "list").len(), with_one);
    // A watch lasts a minute. Reading the log takes time in which watches may be renewed.
    let watches = requests(&fixture, "watch").len();
    let rounds = started.elapsed().as_secs() as usize / 60 + 1;
    assert!(watches <= 3 * rounds, "{watches} watches in {rounds} minutes");
    // All of them see a change.
    let status = json!({"phase": "Completed", "trialsClosed": 1});
    fixture.set_status("experiment", "mnist", &status);
    for (live, viewer) in pages.iter_mut().zip(std::iter::once(&first).chain(&viewers)) {
        live.wait_for("change");
        wait_until("the viewer sees the change", || {
            let list = viewer.get("/experiments.json");
            if list.contains("Completed") { Ok(()) } else { Err(list) }
        })
        .unwrap();
    }
    assert_eq!(requests(&fixture, "list").len(), with_one);
    // The watch continues after its viewer has left.
    for viewer in viewers.iter().skip(ACCOUNTS - 2).step_by(ACCOUNTS) {
        assert!(viewer.post("/sign-out", "").starts_with("HTTP/1.1 303"));
    }
    fixture.set_status("experiment", "mnist", &json!({"phase": "Failed"}));
    wait_until("the first viewer sees the next change", || {
        let list = first.get("/experiments.json");
        if list.contains("Failed") { Ok(()) } else { Err(list) }
    })
    .unwrap();
    assert_eq!(requests(&fixture, "list").len(), with_one);
}
