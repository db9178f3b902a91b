//! Tests with servers that send prepared responses.

use serde_json::json;
use stoker_api::external::{
    NoFields, OrderedEvent, Question, QuestionSpec, SearchEvent, SearcherUrl,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

fn question() -> Question {
    Question {
        version: 1,
        experiment: "mnist-0b3f9c1e".to_owned(),
        call: 0,
        spec: QuestionSpec { searcher: json!({}), hyperparameters: json!({}) },
        events: vec![OrderedEvent { order: 0, event: SearchEvent::Began(NoFields {}) }],
        history: None,
    }
}

/// Serves one connection: returns the request and sends `response`.
async fn serve(listener: TcpListener, response: Vec<u8>) -> String {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut request = vec![];
    let body = serde_json::to_string(&question()).unwrap();
    while !String::from_utf8_lossy(&request).ends_with(&body) {
        let mut buffer = [0; 4096];
        let num_read = stream.read(&mut buffer).await.unwrap();
        assert!(num_read > 0, "{}", String::from_utf8_lossy(&request));
        request.extend(&buffer[..num_read]);
    }
    // The client may close the connection before it has read everything.
    let _ = stream.write_all(&response).await;
    String::from_utf8(request).unwrap()
}

async fn exchange(response: Vec<u8>) -> (Result<Answer, AskError>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = SearcherUrl::parse(&format!("http://127.0.0.1:{port}/ask?x=1")).unwrap();
    let server = tokio::spawn(serve(listener, response));
    let answer = ask("127.0.0.1", &url, &question()).await;
    (answer, server.await.unwrap())
}

fn response(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

async fn check(response: Vec<u8>, reason: &str, words: &str) {
    let error = exchange(response).await.0.unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(error.reason(), reason, "{error}");
}

#[tokio::test]
async fn question_is_posted_and_answered() {
    let (answer, request) = exchange(response("200 OK", r#"{"call":0,"actions":[]}"#)).await;
    assert_eq!(answer, Ok(Answer { call: 0, actions: vec![] }));
    assert!(request.starts_with("POST /ask?x=1 HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("content-type: application/json\r\n"), "{request}");
    assert!(request.contains("host: 127.0.0.1:"), "{request}");
}

#[tokio::test]
async fn host_is_not_looked_up_with_an_address() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = SearcherUrl::parse(&format!("http://searcher:{port}/ask")).unwrap();
    let server = tokio::spawn(serve(listener, response("200 OK", r#"{"call":0,"actions":[]}"#)));
    let answer = ask_at("127.0.0.1", "searcher.ns.svc", &url, &question()).await;
    assert_eq!(answer, Ok(Answer { call: 0, actions: vec![] }));
    assert!(server.await.unwrap().contains(&format!("host: searcher.ns.svc:{port}\r\n")));
}

#[tokio::test]
async fn other_responses_are_refused_with_their_words() {
    let (refused, unavailable) = ("AnswerRefused", "SearcherUnavailable");
    let location =
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n";
    check(location.to_vec(), refused, "redirects are not followed").await;
    check(response("422 x", "no \nspace"), refused, "`no  space`; expected 200").await;
    check(response("503 x", "the disk is full"), unavailable, "`the disk is full`").await;
    check(response("200 OK", "<html>"), refused, "it begins with `<html>`").await;
    let large = format!("{}{{}}", " ".repeat(ANSWER_BYTES_MAX));
    check(response("200 OK", &large), refused, "more than 1048576 bytes").await;
    check(b"SSH-2.0\r\n".to_vec(), unavailable, "cannot reach the external searcher").await;
    check(vec![], unavailable, "cannot reach the external searcher").await;
}

#[tokio::test]
async fn closed_port_is_an_outage() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let url = SearcherUrl::parse(&format!("http://127.0.0.1:{port}")).unwrap();
    let error = ask("127.0.0.1", &url, &question()).await.unwrap_err();
    assert_eq!(error.reason(), "SearcherUnavailable", "{error}");
}

#[tokio::test(start_paused = true)]
async fn silent_server_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = SearcherUrl::parse(&format!("http://127.0.0.1:{port}")).unwrap();
    let error = ask("127.0.0.1", &url, &question()).await.unwrap_err();
    assert!(error.to_string().contains("within 30 s"), "{error}");
}

#[test]
fn long_responses_are_shortened() {
    assert_eq!(words(" a\tb\n".as_bytes()), "a b");
    let long = words("x".repeat(1000).as_bytes());
    assert_eq!(long.len(), WORDS_CHARS_MAX + 3);
    let answer = parse(&vec![b' '; ANSWER_BYTES_MAX + 1]).unwrap_err();
    assert_eq!(answer, too_large());
}
