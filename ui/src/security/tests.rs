//! Tests of access: through the router, as a browser sends requests.

use axum::body::{Body, to_bytes};
use axum::http::{Request as HttpRequest, request::Builder};
use serde_json::json;
use tower_service::Service as _;

use super::*;
use crate::fixture::{self, FakeDirectory};
use crate::router::{router, routes};
use crate::sessions::Offer;
use crate::store::Store;
use crate::visible::Visible;

const MARK: &str = "vision-secret";

/// Sends a request. Returns status, headers and text.
async fn send(gate: Gate, request: Builder, body: &str) -> (u16, HeaderMap, String) {
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let response = router(gate).call(request).await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    // A stream of live updates does not end by itself.
    if headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream") {
        return (status, headers, String::new());
    }
    let bytes = to_bytes(response.into_body(), 1 << 22).await.unwrap();
    (status, headers, String::from_utf8_lossy(&bytes).into_owned())
}

fn private() -> Gate {
    let access = Access {
        token: "secret".to_owned(),
        hosts: vec!["127.0.0.1:8265".to_owned(), "localhost:8265".to_owned()],
        cookie: "stoker-8265".to_owned(),
    };
    let visible = Visible::all(Arc::new(Store::default()));
    let (site, metrics) = (Site::default(), Arc::default());
    Gate::Private(access, Arc::new(Viewer { visible, site, metrics, session: None }))
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

/// Sends a GET request to a private page. Returns the status and the target of a redirect.
fn get_private(uri: &str, host: &str, cookie: &str) -> (u16, String) {
    let request = HttpRequest::get(uri).header("host", host).header("cookie", cookie);
    let (status, headers, _) = block_on(send(private(), request, ""));
    let location = headers.get(header::LOCATION).map(|value| value.to_str().unwrap().to_owned());
    (status, location.unwrap_or_default())
}

#[test]
fn requests_need_the_token_and_a_loopback_host() {
    let check = |uri: &str, host: &str, cookie: &str, status: u16| {
        let answer = get_private(uri, host, cookie);
        assert_eq!(answer, (status, String::new()), "{uri} {host} {cookie}");
    };
    let host = "127.0.0.1:8265";
    let path = "/experiments";
    check(path, host, "stoker-8265=secret", 200);
    check(path, host, "a=b; stoker-8265=secret", 200);
    check(path, host, "", 403);
    check(path, host, "stoker-8265=secre", 403);
    check(path, host, "stoker-1=secret", 403);
    check(path, "evil.example", "stoker-8265=secret", 403);
    check("/assets/app.js", host, "", 403);
    check("/?token=wrong", host, "stoker-8265=secret", 403);
}

#[test]
fn token_moves_from_the_url_into_a_cookie() {
    let redirect = |to: &str| (303, to.to_owned());
    let host = "localhost:8265";
    assert_eq!(get_private("/?token=secret", host, ""), redirect("/"));
    assert_eq!(get_private("/a?x=1&token=secret&y=2", host, ""), redirect("/a?x=1&y=2"));
    let target = get_private("//evil.example?token=secret", host, "");
    assert_eq!(target, redirect("/evil.example"));
}

/// A shared page with runs and jobs in the namespaces `ml` and `vision`.
struct Shared {
    directory: Arc<FakeDirectory>,
    sessions: Arc<Sessions>,
}

impl Shared {
    fn new(sign_in: SignIn, no_storage: Option<&str>) -> Self {
        let directory =
            FakeDirectory { no_storage: no_storage.map(str::to_owned), ..FakeDirectory::default() };
        for namespace in ["ml", "vision"] {
            let trial = json!({"phase": "Running", "batches": 4, "bestMetric": "0.5",
                "attempts": [{"number": 0}], "checkpoints": [{"name": "000000000004-0",
                "batches": 4, "manifestSha256": "", "bytes": 0}]});
            let spec = json!({"description": format!("{namespace}-secret")});
            let mut run = fixture::run(spec, json!({"phase": "Running"}), &[trial]);
            run.namespace = namespace.to_owned();
            directory.store.replace(run);
            let mut job = fixture::job(json!({"phase": "Running"}), true);
            job.namespace = namespace.to_owned();
            job.output_url = format!("s3://{namespace}-secret");
            directory.store.replace_job(job);
        }
        directory.namespaces.lock().unwrap().push("ml".to_owned());
        let directory = Arc::new(directory);
        let offer = Offer {
            directory: directory.clone(),
            sign_in,
            hosts: vec!["stoker.example.com".to_owned()],
            allows_actions: true,
        };
        Self { directory, sessions: Arc::new(Sessions::new(offer)) }
    }

    fn gate(&self) -> Gate {
        Gate::Shared(self.sessions.clone(), Arc::default())
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, HeaderMap, String) {
        let request = HttpRequest::get(path).header("host", "stoker.example.com");
        let add = |all: Builder, (name, value): &(&str, &str)| all.header(*name, *value);
        send(self.gate(), headers.iter().fold(request, add), "").await
    }

    async fn post(&self, path: &str, cookie: &str, body: &str) -> (u16, HeaderMap, String) {
        let request = HttpRequest::post(path).header("host", "stoker.example.com");
        send(self.gate(), request.header("cookie", cookie), body).await
    }

    async fn sign_in(&self, user: &str) -> String {
        let secret = self.sessions.start(Token::new(user).unwrap()).await.unwrap();
        format!("__Host-stoker-session={secret}")
    }
}

/// Returns the URLs of a route, with the run or job of a namespace.
fn urls(path: &str, namespace: &str) -> Vec<String> {
    let name = if path.starts_with("/jobs") { "species" } else { "iris" };
    let path = path
        .replace("{namespace}", namespace)
        .replace("{name}", name)
        .replace("{index}", "0")
        .replace("{checkpoint}", "000000000004-0")
        .replace("{action}", "pause")
        .replace("{*file}", "weights");
    let queries = [format!("?e={namespace}/iris-01234567"), format!("?namespace={namespace}")];
    let tabs = [
        "trials",
        "rungs",
        "hyperparameters",
        "checkpoints",
        "configuration",
        "events",
        "logs",
        "compare",
        "data.json",
        "curves.json",
        "curves.csv",
        "trials.csv",
        "data.csv",
        "trials.json",
        "metrics",
        "attempts",
        "profiler",
        "profiler.json",
        "profiler.csv",
        "logs.json",
        "logs.txt",
    ];
    match path.contains("{tab}") {
        true => tabs.iter().map(|tab| path.replace("{tab}", tab)).collect(),
        false => {
            let with = queries.iter().map(|query| format!("{path}{query}"));
            std::iter::once(path.clone()).chain(with).collect()
        }
    }
}

#[tokio::test]
async fn no_route_shows_a_hidden_namespace() {
    let page = Shared::new(SignIn::Form, None);
    let cookie = page.sign_in("ada").await;
    let headers = [("cookie", cookie.as_str()), ("accept", "text/html")];
    let mut num_shown = 0;
    for (path, _) in routes() {
        for url in urls(&path, "vision") {
            let (status, _, text) = page.get(&url, &headers).await;
            let names_it = url.contains("/vision/");
            assert!(!text.contains(MARK) && !text.contains("vision/iris-0"), "{url}: {text}");
            assert!(!names_it || status == 404 || url.contains("/sign-out"), "{url}: {status}");
        }
        for url in urls(&path, "ml") {
            num_shown += usize::from(page.get(&url, &headers).await.2.contains("iris-01234567"));
        }
        // Without a session, no route answers with anything but the way to the sign-in.
        for url in urls(&path, "ml") {
            let (status, answer, text) = page.get(&url, &headers[1..]).await;
            let target = answer.get(header::LOCATION).map(|to| to.to_str().unwrap());
            assert!(target.is_some_and(|to| to.starts_with("/sign-in?next=")), "{url}");
            assert_eq!((status, text.as_str()), (303, ""), "{url}");
            let (status, _, text) = page.get(&url, &[]).await;
            assert!(status == 401 && !text.contains("iris"), "{url}: {status} {text}");
        }
    }
    assert!(num_shown > 12, "{num_shown}");
    let form = format!("uid={}", fixture::UID);
    let post = "/experiments/vision/iris/actions/pause";
    assert_eq!(page.post(post, "", &form).await.0, 401);
    assert_eq!(page.post(post, &cookie, &form).await.0, 403);
}

#[tokio::test]
async fn viewer_without_a_namespace_is_asked_for_one() {
    let page = Shared::new(SignIn::Form, None);
    let target = async |name: &str| {
        let cookie = page.sign_in(name).await;
        let (_, answer, _) = page.get("/experiments", &[("cookie", &cookie)]).await;
        answer.get(header::LOCATION).map(|to| to.to_str().unwrap().to_owned())
    };
    assert_eq!(target("eve").await.as_deref(), Some("/namespaces"));
    assert_eq!(target("ada").await, None);
}

#[tokio::test]
async fn refused_storage_leaves_the_record() {
    let page = Shared::new(SignIn::Form, Some("secrets \"s3\" is forbidden"));
    let cookie = page.sign_in("ada").await;
    let get = async |path: &str| {
        let path = format!("/experiments/ml/iris/{path}");
        let (status, _, text) = page.get(&path, &[("cookie", &cookie)]).await;
        (status, text)
    };
    assert_eq!(get("trials").await.0, 200);
    let tabs = ["curves.json", "trials/0/curves.json", "trials/0/logs.json", "trials/0/logs.txt"];
    for tab in tabs.iter().chain(&["trials/0/profiler.json"]) {
        let (status, text) = get(tab).await;
        assert!(status == 502 && text.contains("is forbidden"), "{tab}: {status} {text}");
    }
    let (status, text) = get("trials/0/checkpoints/000000000004-0").await;
    assert!(status == 200 && text.contains("is forbidden"), "{text}");
}

#[tokio::test]
async fn zoomed_curves_take_fractions() {
    let page = Shared::new(SignIn::Form, None);
    let cookie = page.sign_in("ada").await;
    for tab in ["curves.json", "curves.csv", "trials/0/curves.json"] {
        let path = format!("/experiments/ml/iris/{tab}?x=epochs&from=0.5&to=2.25");
        let (status, _, text) = page.get(&path, &[("cookie", &cookie)]).await;
        assert_eq!(status, 200, "{tab}: {text}");
    }
}

#[tokio::test]
async fn form_starts_a_session_in_a_strict_cookie() {
    let page = Shared::new(SignIn::Form, None);
    let (status, _, text) = page.get("/sign-in?next=/jobs", &[]).await;
    assert!(status == 200 && text.contains("value=\"/jobs\""), "{text}");
    assert_eq!(page.get("/assets/app.js", &[]).await.0, 200);
    let (status, _, text) = page.post("/sign-in", "", "token=wrong&next=/jobs").await;
    assert!(status == 401 && text.contains("Unauthorized"), "{text}");
    let (status, headers, _) = page.post("/sign-in", "", "token=ada&next=/jobs").await;
    let cookie = headers[header::SET_COOKIE].to_str().unwrap();
    let (value, attributes) = cookie.split_once("; ").unwrap();
    assert_eq!(attributes, "Path=/; HttpOnly; SameSite=Strict; Secure");
    assert_eq!(
        (status, &headers[header::LOCATION]),
        (303, &"/signed-in?next=%2Fjobs".parse().unwrap())
    );
    // The page explains a dropped cookie.
    let (status, _, text) = page.get("/signed-in?next=/jobs", &[]).await;
    assert!(status == 401 && text.contains("https://"), "{text}");
    let (status, headers, _) = page.get("/signed-in?next=/jobs", &[("cookie", value)]).await;
    assert_eq!((status, &headers[header::LOCATION]), (303, &"/jobs".parse().unwrap()));
    let (status, headers, text) = page.get("/jobs", &[("cookie", value)]).await;
    assert_eq!((status, &headers[header::CACHE_CONTROL]), (200, &"no-store".parse().unwrap()));
    assert!(text.contains("title=\"ada\"") && text.contains("Sign out"), "{text}");
    let csrf = text.split("name=\"csrf\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    // Forms need the token of their session.
    for (form, status) in [("csrf=wrong&name=vision", 403), ("name=vision", 403)] {
        assert_eq!(page.post("/namespaces", value, form).await.0, status, "{form}");
    }
    assert_eq!(*page.directory.namespaces.lock().unwrap(), ["ml"]);
    let other = page.sign_in("grace").await;
    let form = format!("csrf={csrf}&name=vision");
    assert_eq!(page.post("/namespaces", &other, &form).await.0, 403);
    assert_eq!(page.post("/namespaces", value, &form).await.0, 303);
    assert!(page.get("/experiments.json", &[("cookie", value)]).await.2.contains("vision"));
    assert_eq!(page.post("/sign-out", value, "csrf=wrong").await.0, 403);
    let (status, headers, _) = page.post("/sign-out", value, &format!("csrf={csrf}")).await;
    assert!(status == 303 && headers[header::SET_COOKIE].to_str().unwrap().contains("Max-Age=0"));
    assert_eq!(page.get("/jobs", &[("cookie", value)]).await.0, 401);
    assert_eq!(*page.directory.ended.lock().unwrap(), 1);
}

#[tokio::test]
async fn links_of_other_sites_find_the_session() {
    let page = Shared::new(SignIn::Form, None);
    let refresh = async |path: &str, site: &str| {
        let (status, headers, _) = page.get(path, &[("sec-fetch-site", site)]).await;
        assert_eq!(status, 200, "{path} {site}");
        headers.get(header::REFRESH).map(|value| value.to_str().unwrap().to_owned())
    };
    let again = "/sign-in?next=%2Fjobs&again=1";
    let expected = Some(format!("0; url={again}"));
    assert_eq!(refresh("/sign-in?next=/jobs", "cross-site").await, expected);
    // Without a session, the form stays.
    assert_eq!(refresh(again, "cross-site").await, None);
    assert_eq!(refresh("/sign-in?next=/jobs", "same-origin").await, None);
    let cookie = page.sign_in("ada").await;
    let headers = [("cookie", cookie.as_str()), ("sec-fetch-site", "same-origin")];
    let (status, headers, _) = page.get(again, &headers).await;
    assert_eq!((status, &headers[header::LOCATION]), (303, &"/jobs".parse().unwrap()));
    // Forms of other sites stay refused, with and without a session.
    for cookie in ["", cookie.as_str()] {
        let request = HttpRequest::post("/sign-out").header("host", "stoker.example.com");
        let request = request.header("cookie", cookie).header("sec-fetch-site", "cross-site");
        assert_eq!(send(page.gate(), request, "").await.0, 403);
    }
}

#[tokio::test]
async fn cookies_over_loopback_need_no_tls() {
    let page = Shared::new(SignIn::Form, None);
    let request = HttpRequest::post("/sign-in").header("host", "localhost:8080");
    let (_, headers, _) = send(page.gate(), request, "token=ada").await;
    let cookie = headers[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.starts_with("stoker-session-8080="), "{cookie}");
    assert!(cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"), "{cookie}");
}

#[tokio::test]
async fn proxy_signs_viewers_in_by_a_header() {
    let page = Shared::new(SignIn::Header, None);
    let get = async |value: &str| page.get("/experiments.json", &[("authorization", value)]).await;
    let (status, _, text) = get("Bearer ada").await;
    assert!(status == 200 && text.contains("iris") && !text.contains(MARK), "{text}");
    get("Bearer ada").await;
    assert_eq!(*page.directory.asked.lock().unwrap(), 1, "a session keeps the check");
    for value in ["Bearer wrong", "Basic ada", "", "Bearer"] {
        assert_eq!(get(value).await.0, 401, "{value}");
    }
    // Cookies and forms are not accepted.
    assert_eq!(page.post("/sign-in", "", "token=ada").await.0, 401);
    let cookie = page.sign_in("ada").await;
    assert_eq!(page.get("/experiments", &[("cookie", &cookie)]).await.0, 401);
}

#[tokio::test]
async fn forms_stay_valid_when_a_proxy_refreshes_a_token() {
    let page = Shared::new(SignIn::Header, None);
    let csrf_of = async |token: &str| {
        let value = format!("Bearer {token}");
        let (_, _, text) = page.get("/namespaces", &[("authorization", &value)]).await;
        let csrf = text.split("name=\"csrf\" value=\"").nth(1).unwrap();
        csrf.split('"').next().unwrap().to_owned()
    };
    let add = async |token: &str, csrf: &str| {
        let request = HttpRequest::post("/namespaces").header("host", "stoker.example.com");
        let request = request.header("authorization", format!("Bearer {token}"));
        send(page.gate(), request, &format!("csrf={csrf}&name=vision")).await.0
    };
    let csrf = csrf_of("ada").await;
    assert_eq!(add("ada.2", &csrf).await, 303);
    assert_eq!(add("grace", &csrf).await, 403, "the form of another user");
    // Another server has another key.
    let other = Shared::new(SignIn::Header, None);
    let value = [("authorization", "Bearer ada")];
    assert!(!other.get("/namespaces", &value).await.2.contains(&csrf));
}

#[tokio::test]
async fn shared_page_answers_to_its_names_only() {
    let page = Shared::new(SignIn::Form, None);
    let status = async |path: &str, host: &str| {
        send(page.gate(), HttpRequest::get(path).header("host", host), "").await.0
    };
    for host in ["stoker.example.com", "Stoker.example.com:443", "localhost:1", "[::1]:8265"] {
        assert_eq!(status("/sign-in", host).await, 200, "{host}");
    }
    for host in ["evil.example", "stoker.example.com.evil.example", "", "10.0.0.1:8265"] {
        assert_eq!(status("/sign-in", host).await, 403, "{host}");
    }
    // The node probes the address of the pod.
    assert_eq!(status("/healthz", "10.0.0.1:8265").await, 200);
}

#[tokio::test]
async fn forms_of_other_sites_are_refused() {
    let page = Shared::new(SignIn::Form, None);
    let status = async |site: &str| {
        let request = HttpRequest::post("/sign-in").header("host", "stoker.example.com");
        send(page.gate(), request.header("sec-fetch-site", site), "token=ada").await.0
    };
    assert_eq!(status("same-origin").await, 303);
    assert_eq!(status("none").await, 303);
    assert_eq!(status("cross-site").await, 403);
    assert_eq!(status("same-site").await, 403);
}
