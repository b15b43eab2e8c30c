// fakellm: fake OpenAI-compatible upstream, single thread, epoll.  cc -O2 -o fakellm fakellm.c
// usage: engine PORT [SOCKET].  POST body fields read: "stream":true, "max_tokens":N (chunks), "seed":U (µs between chunks, 0 = burst; a whole answer waits for all of them)
// On SOCKET it speaks as llama.cpp's server does: GET /health, POST /apply-template, POST /completion (n_predict, seed).
// every chunk's content carries the CLOCK_MONOTONIC ns of its write as "@<ns>@", so a client on this host can time one-way delay.
#define _GNU_SOURCE
#include <stdio.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <signal.h>
#define MAXFD 4096
typedef struct { int used, llama, whole, inlen, streaming, left, total; long interval; long long next; char in[65536]; char out[1024]; int outlen, outoff; int wantw; } conn;
static conn *cs[MAXFD]; static int ep; static int maxfd=0;
static long long now(){ struct timespec t; clock_gettime(CLOCK_MONOTONIC,&t); return t.tv_sec*1000000000LL+t.tv_nsec; }
static void closec(int fd){ close(fd); cs[fd]->used=0; }
static int flushc(int fd){ conn*c=cs[fd]; while(c->outoff<c->outlen){ ssize_t n=send(fd,c->out+c->outoff,c->outlen-c->outoff,MSG_NOSIGNAL); if(n<0){ if(errno==EAGAIN){ if(!c->wantw){c->wantw=1; struct epoll_event e={.events=EPOLLIN|EPOLLOUT,.data.fd=fd}; epoll_ctl(ep,EPOLL_CTL_MOD,fd,&e);} return 0;} closec(fd); return -1;} c->outoff+=n; } c->outlen=c->outoff=0; if(c->wantw){c->wantw=0; struct epoll_event e={.events=EPOLLIN,.data.fd=fd}; epoll_ctl(ep,EPOLL_CTL_MOD,fd,&e);} return 1; }
static void put_llama(conn*c){ char b[600]; int n, said=c->total-c->left;
  if(c->left>1) n=sprintf(b,"data: {\"index\":0,\"content\":\"@%lld@\",\"tokens\":[%d],\"stop\":false,\"id_slot\":0,\"tokens_predicted\":%d,\"tokens_evaluated\":40}\n\n",now(),1000+said,said+1);
  else n=sprintf(b,"data: {\"index\":0,\"content\":\"\",\"tokens\":[],\"stop\":true,\"stop_type\":\"limit\",\"id_slot\":0,\"tokens_predicted\":%d,\"tokens_evaluated\":40,\"timings\":{\"prompt_ms\":1.0,\"predicted_ms\":2.0}}\n\n",said);
  c->outlen=sprintf(c->out,"%x\r\n",n); memcpy(c->out+c->outlen,b,n); c->outlen+=n; memcpy(c->out+c->outlen,"\r\n",2); c->outlen+=2;
  if(c->left==1){ memcpy(c->out+c->outlen,"0\r\n\r\n",5); c->outlen+=5; } c->left--; }
// A whole answer, after the time its chunks would have taken.
static void put_whole(conn*c){ char b[600]; int m=sprintf(b,"{\"id\":\"chatcmpl-7f3a9c2e51d84b0f\",\"object\":\"chat.completion\",\"created\":1764599524,\"model\":\"fake\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"@%lld@ hello there from the fake model\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":12,\"total_tokens\":21}}",now());
  c->outlen=sprintf(c->out,"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s",m,b); c->left=0; }
static void put_chunk(conn*c){ if(c->whole){ put_whole(c); return; } if(c->llama){ put_llama(c); return; } char b[600]; int n;
  if(c->left>1) n=sprintf(b,"data: {\"id\":\"chatcmpl-7f3a9c2e51d84b0f\",\"object\":\"chat.completion.chunk\",\"created\":1764599524,\"model\":\"fake\",\"system_fingerprint\":null,\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"@%lld@\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",c->left==c->total?"\"role\":\"assistant\",":"",now());
  else n=sprintf(b,"data: {\"id\":\"chatcmpl-7f3a9c2e51d84b0f\",\"object\":\"chat.completion.chunk\",\"created\":1764599524,\"model\":\"fake\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
  c->outlen=sprintf(c->out,"%x\r\n",n); memcpy(c->out+c->outlen,b,n); c->outlen+=n; memcpy(c->out+c->outlen,"\r\n",2); c->outlen+=2;
  if(c->left==1){ memcpy(c->out+c->outlen,"0\r\n\r\n",5); c->outlen+=5; } c->left--; }
static void pump(int fd){ conn*c=cs[fd]; for(;;){ int r=flushc(fd); if(r<=0) return; if(!c->streaming) return; if(!c->left){c->streaming=0; return;} if(c->interval){ long long t=now(); if(t<c->next) return; c->next+=c->interval*1000; } put_chunk(c);} }
static long field(char*b,const char*k,long d){ char*p=strstr(b,k); if(!p) return d; p+=strlen(k); while(*p==' '||*p==':'||*p=='"') p++; return atol(p); }
static void tryparse(int fd){ conn*c=cs[fd]; c->in[c->inlen]=0; char*h=strstr(c->in,"\r\n\r\n"); if(!h) return; long cl=0; char*p=strcasestr(c->in,"content-length:"); if(p&&p<h) cl=atol(p+15); int need=(h-c->in)+4+cl; int chunked=0; p=strcasestr(c->in,"transfer-encoding:"); if(p&&p<h) chunked=1;
  if(chunked){ char*e=strstr(h+4,"0\r\n\r\n"); if(!e) return; need=(e-c->in)+5; }
  if(c->inlen<need) return; char*body=h+4; int stream=0; p=strstr(body,"\"stream\""); if(p){ p+=8; while(*p==':'||*p==' ')p++; stream=(*p=='t'); }
  if(c->llama) stream=!strncmp(c->in,"POST /completion",16); long n=field(body,c->llama?"\"n_predict\"":"\"max_tokens\"",0); long iv=field(body,"\"seed\"",0); if(n<2) n=2;
  if(stream){ c->outlen=sprintf(c->out,"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"); c->whole=0; c->streaming=1; c->total=c->left=n; c->interval=iv; c->next=now()+(iv?iv*1000LL*(rand()%1000)/1000:0); }
  else if(c->llama){ const char*b=!strncmp(c->in,"GET",3)?"{\"status\":\"ok\"}":"{\"prompt\":\"Tell me.\"}"; c->outlen=sprintf(c->out,"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",strlen(b),b); c->streaming=0; }
  else { c->whole=1; c->streaming=1; c->total=c->left=1; c->interval=iv*n; c->next=now()+c->interval*1000LL; }
  memmove(c->in,c->in+need,c->inlen-need); c->inlen-=need; c->outoff=0; pump(fd); }
int main(int argc,char**argv){ signal(SIGPIPE,SIG_IGN); int port=atoi(argv[1]); int ls=socket(AF_INET,SOCK_STREAM|SOCK_NONBLOCK,0),one=1; setsockopt(ls,SOL_SOCKET,SO_REUSEADDR,&one,sizeof one); struct sockaddr_in a={.sin_family=AF_INET,.sin_port=htons(port),.sin_addr.s_addr=htonl(INADDR_LOOPBACK)}; if(bind(ls,(void*)&a,sizeof a)){perror("bind");return 1;} listen(ls,1024); ep=epoll_create1(0); int us=-1; if(argc>2){ us=socket(AF_UNIX,SOCK_STREAM|SOCK_NONBLOCK,0); struct sockaddr_un u={.sun_family=AF_UNIX}; strncpy(u.sun_path,argv[2],sizeof u.sun_path-1); unlink(argv[2]); if(bind(us,(void*)&u,sizeof u)){perror("bind");return 1;} listen(us,1024); struct epoll_event e3={.events=EPOLLIN,.data.fd=us}; epoll_ctl(ep,EPOLL_CTL_ADD,us,&e3); } struct epoll_event e={.events=EPOLLIN,.data.fd=ls}; epoll_ctl(ep,EPOLL_CTL_ADD,ls,&e); struct epoll_event ev[256];
 for(;;){ long long t=now(),nx=-1; for(int i=0;i<=maxfd;i++) if(cs[i]&&cs[i]->used&&cs[i]->streaming&&cs[i]->interval&&!cs[i]->wantw){ if(nx<0||cs[i]->next<nx) nx=cs[i]->next; }
  struct timespec ts,*tp=0; if(nx>=0){ long long d=nx-t; if(d<0)d=0; ts.tv_sec=d/1000000000; ts.tv_nsec=d%1000000000; tp=&ts; }
  int n=epoll_pwait2(ep,ev,256,tp,0); if(nx>=0){ t=now(); for(int i=0;i<=maxfd;i++) if(cs[i]&&cs[i]->used&&cs[i]->streaming&&cs[i]->interval&&!cs[i]->wantw&&cs[i]->next<=t) pump(i); }
  for(int k=0;k<n;k++){ int fd=ev[k].data.fd; if(fd==ls||fd==us){ int f; while((f=accept4(fd,0,0,SOCK_NONBLOCK))>=0){ if(f>=MAXFD){close(f);continue;} if(fd==ls) setsockopt(f,IPPROTO_TCP,TCP_NODELAY,&one,sizeof one); if(!cs[f]) cs[f]=malloc(sizeof(conn)); memset(cs[f],0,offsetof(conn,in)); cs[f]->llama=fd==us; cs[f]->outlen=cs[f]->outoff=cs[f]->wantw=0; cs[f]->used=1; if(f>maxfd)maxfd=f; struct epoll_event e2={.events=EPOLLIN,.data.fd=f}; epoll_ctl(ep,EPOLL_CTL_ADD,f,&e2);} continue; }
   conn*c=cs[fd]; if(!c||!c->used) continue; if(ev[k].events&EPOLLOUT) pump(fd); if(c->used&&(ev[k].events&(EPOLLIN|EPOLLHUP|EPOLLERR))){ ssize_t r=recv(fd,c->in+c->inlen,sizeof(c->in)-1-c->inlen,0); if(r<=0){ if(r<0&&errno==EAGAIN) continue; closec(fd); continue;} c->inlen+=r; tryparse(fd);} } } }
